"""Advisories on the page: the run's diagnostics, each with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_rl.monitor.advisories import advisories_of
from grpo_rl.report.files import read_config, read_rows


def build(run_dir: Path) -> dict[str, Any] | None:
    """The advisories over the run's metrics; None where there is none."""
    found = []
    for advisory in advisories_of(read_rows(run_dir), read_config(run_dir)):
        since, until = advisory.since, advisory.until
        when = f"since step {since}" if until is None else f"steps {since} to {until}"
        title = f"{advisory.name.replace('_', ' ').capitalize()}, {when}"
        text = f"{advisory.seen[:1].upper()}{advisory.seen[1:]}."
        remedy = f"Try {advisory.setting}. See {advisory.page}"
        found.append({"id": advisory.name, "title": title, "text": text, "remedy": remedy})
    return {"advisories": found} if found else None
