"""The settings of a run, and the versions that it ran with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from grpo_rl.report.files import CONFIG, OVERRIDES, read_config, read_started, read_summary, versions
from grpo_rl.storage.dotted import flat


def build(run_dir: Path) -> dict[str, Any] | None:
    """Overrides, every setting as (key, value), the config's text, and versions; None where no config was stored."""
    text = read_started(run_dir, CONFIG)
    overrides = yaml.safe_load(read_started(run_dir, OVERRIDES)) or []
    if not text and not overrides:
        return None
    return {
        "overrides": [str(word) for word in overrides],
        "settings": [[key, str(value)] for key, value in flat(read_config(run_dir)).items()],
        "text": text,
        "versions": list((read_summary(run_dir).get("versions") or versions()).items()),
    }
