"""The time of a step against the machine's roofline, phase by phase."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.report.files import read_rows

LIMITED_PHASES = ("sample", "score", "train", "sync")
"""Phases of a step for which a floor is known."""
NEGLIGIBLE = 0.001
"""A phase with less than this part of the step, and nothing it had to do, is not shown."""


def build(run_dir: Path) -> dict[str, Any] | None:
    """The phases of a run folder's steps; None where it logged no rooflines."""
    phases = phase_times(read_rows(run_dir))
    return {"phases": phases} if phases else None


def phase_times(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """The seconds a step took and its floor, then the same of each phase: medians, in seconds; empty without rooflines.

    ``length`` is a phase's part of the step, ``share`` the floor's part of the phase: None where there is no floor.

    >>> row = {"time/sample_s": 4.0, "time/train_s": 3.0, "time/other_s": 1.0}
    >>> row |= {"limit_fraction": 0.5, "limit_fraction/sample": 0.25, "limit_fraction/train": 1.0}
    >>> for phase in phase_times([row]): print(list(phase.values()))
    ['step', 8.0, 1.0, 4.0, 0.5]
    ['sample', 4.0, 0.5, 1.0, 0.25]
    ['train', 3.0, 0.375, 3.0, 1.0]
    ['other', 1.0, 0.125, 0.0, None]
    """
    rows = [row for row in rows if "limit_fraction" in row]
    if not rows:
        return []
    phases = (*LIMITED_PHASES, "other")
    spent = {phase: [row.get(f"time/{phase}_s", 0.0) for row in rows] for phase in phases}
    spent = {"step": [sum(parts) for parts in zip(*spent.values(), strict=True)], **spent}
    step_s = statistics.median(spent["step"])
    found = []
    for name, seconds in spent.items():
        metric = "limit_fraction" if name == "step" else f"limit_fraction/{name}"
        spent_s = statistics.median(seconds)
        floor_s = statistics.median(row.get(metric, 0.0) * s for row, s in zip(rows, seconds, strict=True))
        if floor_s or spent_s > NEGLIGIBLE * step_s:
            share = floor_s / spent_s if floor_s else None
            found.append(
                {"name": name, "spent_s": spent_s, "length": spent_s / step_s, "floor_s": floor_s, "share": share}
            )
    return found
