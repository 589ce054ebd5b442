"""What a run says at its end: ``summary.json``, ``evaluation.json`` and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_rl.monitor.report import SUMMARY, write_report
from grpo_rl.storage.whole_file import write_whole

EVALUATION, REPORT = "evaluation.json", "report.html"


def write_summary(folder: Path, summary: Mapping[str, object]) -> None:
    """Writes ``summary.json``."""
    write_whole(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def write_evaluation(folder: Path, step: int, rewards: Sequence[float]) -> None:
    """Writes the held-out rewards of a step; JSON has no NaN, the reward of a response that has none."""
    rows = [None if math.isnan(reward) else reward for reward in rewards]
    write_whole(folder / EVALUATION, json.dumps({"step": step, "rewards": rows}, allow_nan=False) + "\n")


def read_evaluation(folder: Path, step: int) -> list[float] | None:
    """The held-out rewards of a step, if they were stored and can be read."""
    try:
        stored = json.loads((folder / EVALUATION).read_text())
        if stored["step"] == step:
            return [math.nan if reward is None else float(reward) for reward in stored["rewards"]]
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def write_report_or_say(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The report's path; None where it can't be written, which is said: all else of the run is there."""
    try:
        return write_report(folder)
    except Exception as error:  # of whatever kind: it must not make a failure of a run that is not one
        say(
            f"Warning. The report can't be written ({type(error).__name__}: {error}); all else is there. Once that "
            f"is mended: python -m grpo_rl.monitor.report {folder}"
        )
        return None
