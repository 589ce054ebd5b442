"""The folder where converted models and measured rates are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$GRPO_RL_CACHE``, or ``grpo_rl`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("GRPO_RL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo_rl"
