"""The recorded run that ``grpo-rl report --demo`` shows; ``tools/record_demo.py`` records it."""

from __future__ import annotations

import shutil
from pathlib import Path

RECORDED = Path(__file__).parent / "assets" / "demo.tar.xz"
"""A run of ``+experiment=quickstart``: 15 steps of SmolLM2-135M-Instruct on two CPU cores."""
NAME = "quickstart"


def unpack(folder: Path) -> Path:
    """Unpacks the recorded run into a folder, and returns the run's own folder there."""
    shutil.unpack_archive(RECORDED, folder, filter="data")
    return folder / NAME
