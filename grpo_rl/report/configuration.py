"""The settings of a run, and the versions that it ran with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from grpo_rl.report.files import CONFIG, read_config, read_overrides, read_summary, versions
from grpo_rl.storage.masking import masked
from grpo_rl.storage.yaml_text import flat


def build(run_dir: Path) -> dict[str, Any] | None:
    """Overrides, every setting as (key, value), the config's text, and versions; None where no config was stored.

    Secrets are masked: the page may be mailed.

    Raises:
        ValueError: config, overrides or summary can't be read; names the file.
    """
    config, overrides = read_config(run_dir), read_overrides(run_dir)
    if not config and not overrides:
        return None
    shown, text = masked(config), (run_dir / CONFIG).read_text(encoding="utf-8") if config else ""
    return {
        "overrides": overrides,
        "settings": [[key, written(value)] for key, value in flat(shown).items()],
        # The text as it is keeps its comments; it can be shown where there is nothing to mask.
        "text": text if shown == config else yaml.safe_dump(shown, sort_keys=False),
        "versions": list((read_summary(run_dir).get("versions") or versions()).items()),
    }


def written(value: object) -> str:
    """A setting as its YAML would say it, on one line.

    >>> written(None), written({}), written(True), written([1, "a"]), written(5e-05), written("text")
    ('null', '{}', 'true', '[1, a]', '5e-05', 'text')
    """
    if isinstance(value, str | float):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...")
