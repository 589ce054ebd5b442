"""Phases of a training step, which its time is divided into."""

from __future__ import annotations

from collections.abc import Mapping

STEP_PHASES = ("read", "sample", "wait", "score", "train", "sync", "other")
"""The phases of a step in the order in which they begin; SFT reads in the place of sampling.

Other metrics under ``time/`` are of no step: the run's clock, an evaluation."""


def step_seconds(row: Mapping[str, float]) -> float | None:
    """The seconds of a step, all of its phases together; None where the line has none of them.

    >>> step_seconds({"time/sample_s": 3.0, "time/other_s": 1.0, "time/at_s": 500.0, "time/evaluate_s": 60.0})
    4.0
    """
    phases = [row[name] for name in (f"time/{phase}_s" for phase in STEP_PHASES) if name in row]
    return sum(phases) if phases else None
