"""The folder where converted models and measured rates are kept between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$GRPO_RL_CACHE``, or ``grpo_rl`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        ValueError: none of these is known, as this user has no home folder.
    """
    if own := os.environ.get("GRPO_RL_CACHE"):
        return Path(os.path.expanduser(own))
    caches = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if caches.startswith("~"):
        raise ValueError("this user has no home folder: set HOME, or GRPO_RL_CACHE, to a folder that can be written")
    return Path(caches) / "grpo_rl"
