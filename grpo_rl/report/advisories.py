"""What the run says about itself: warnings, each with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_rl.monitor.watch import RewardWatch
from grpo_rl.report.files import read_rows


def build(run_dir: Path) -> dict[str, Any] | None:
    """The warnings over the run's metrics; None where there is none."""
    found = [{"id": kind, "text": f"{text}."} for kind, text in RewardWatch.over(read_rows(run_dir)).warnings.items()]
    return {"advisories": found} if found else None
