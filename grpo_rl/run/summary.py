"""Writes a run's results: the exported model, ``summary.json``, ``evaluation.json`` and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_rl.monitor.progress import summary_panel
from grpo_rl.monitor.report import SUMMARY, versions, write_report
from grpo_rl.run.claim import MODEL
from grpo_rl.run.common_parts import CommonParts
from grpo_rl.run.export import export
from grpo_rl.run.logs import RunLogs
from grpo_rl.storage.whole_file import write_whole

EVALUATION, REPORT = "evaluation.json", "report.html"


def end_run(logs: RunLogs, parts: CommonParts, summary: dict[str, object], checkpoint: Path, adapters: str) -> None:
    """Exports the model, its adapters ``merged`` or as ``adapter``, writes summary and report, and shows them."""
    model = logs.folder / MODEL
    export(parts.policy.model, parts.tokenizer, model, adapters, parts.policy.peers)
    report = write_end(logs, summary, checkpoint)
    logs.last_words = summary_panel(summary, checkpoint=checkpoint, model=model, report=report)


def write_end(logs: RunLogs, summary: dict[str, object], checkpoint: Path) -> Path | None:
    """Writes the summary, completed in place, and the report; returns the report's path, None where it failed."""
    summary |= {"versions": versions(), "checkpoint": str(checkpoint)}
    write_summary(logs.folder, summary)
    return try_write_report(logs.folder, logs.note)


def write_summary(folder: Path, summary: Mapping[str, object]) -> None:
    """Writes ``summary.json``."""
    write_whole(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def write_evaluation(folder: Path, step: int, rewards: Sequence[float]) -> None:
    """Writes the held-out rewards of a step, with null for NaN, the reward of a response that has none."""
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


def try_write_report(folder: Path, say: Callable[[str], None]) -> Path | None:
    """Writes the report and returns its path; None, with a warning, if it can't be written."""
    try:
        return write_report(folder)
    except Exception as error:  # a report that fails must not make a finished run fail
        say(
            f"Warning. The report can't be written ({type(error).__name__}: {error}); all else is there. Once that "
            f"is fixed: python -m grpo_rl.monitor.report {folder}"
        )
        return None
