"""The results of an evaluation: per-row scores with intervals, ``eval.json``, responses as Parquet, the table."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from grpo_rl.envs.task import Task
from grpo_rl.intervals import Estimate, mean_interval, paired_gain
from grpo_rl.monitor.step_parts import encodable
from grpo_rl.storage.whole_file import write_whole
from grpo_rl.training.evaluate import Evaluation, row_scores

EVAL = "eval.json"
RESPONSES = "responses"
"""Folder of the responses, a Parquet file for each task; read as one table."""


@dataclass(frozen=True)
class TaskResult:
    """The scores of one task.

    Args:
        row_ids: digest of each row, by which a comparison identifies it.
        scores: per-row numbers by score; NaN where a row could not be judged.
        measures: numbers on the responses: length, truncation, failures.
    """

    row_ids: list[str]
    scores: dict[str, list[float]]
    measures: dict[str, float] = field(default_factory=dict)

    def estimate(self, name: str) -> Estimate | None:
        """The mean of a score with its interval; None where fewer than two rows have it."""
        values = self.scores[name]
        if sum(not math.isnan(value) for value in values) < 2:
            return None
        return mean_interval(values, (-math.inf, math.inf) if name.endswith("reward") else (0.0, 1.0))

    def as_json(self) -> dict[str, Any]:
        """The result as ``eval.json`` holds it, with null for NaN."""
        estimates = {name: self.estimate(name) for name in self.scores}
        return {
            "rows": len(self.row_ids),
            "scores": {name: {"mean": e.mean, "ci95": e.ci95} for name, e in estimates.items() if e},
            "measures": self.measures,
            "row_ids": self.row_ids,
            "row_scores": {name: [None if math.isnan(v) else v for v in row] for name, row in self.scores.items()},
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TaskResult:
        """The result that :meth:`as_json` wrote."""
        scores = {
            name: [math.nan if v is None else float(v) for v in row] for name, row in stored["row_scores"].items()
        }
        return cls(list(stored["row_ids"]), scores, dict(stored["measures"]))


def task_result(task: Task, rows: Sequence[dict], greedy: Evaluation, sampled: Evaluation | None) -> TaskResult:
    """The result of one task's greedy and sampled responses."""
    measures = {"mean_length": float(np.mean(greedy.lengths)), "truncated_fraction": float(np.mean(greedy.truncated))}
    failed = sum(map(math.isnan, [*greedy.rewards, *(sampled.rewards if sampled else [])]))
    return TaskResult([row_id(task, row) for row in rows], row_scores(greedy, sampled), measures | {"failed": failed})


def row_id(task: Task, row: dict) -> str:
    """A digest of a row's prompt and gold answer, by which a row is recognised in two evaluations."""
    return hashlib.sha256(json.dumps([task.prompt(row), task.gold(row)], default=str).encode()).hexdigest()[:16]


def write_responses(folder: Path, name: str, task: Task, rows: Sequence[dict], parts: Mapping[str, Evaluation]) -> None:
    """Writes the responses of one task, with one line for each; ``parts`` are its evaluations, such as ``greedy``."""
    table = []
    for kind, evaluation in parts.items():
        for at, text in enumerate(evaluation.completions):
            row = rows[at // evaluation.samples]
            table.append(
                {
                    "task": name, "kind": kind, "row": at // evaluation.samples, "sample": at % evaluation.samples,
                    "query": _text(task.prompt(row)[-1]["content"]), "gold": _text(task.gold(row)),
                    "completion": _text(text),
                    "answer": _text(evaluation.answers[at]) if evaluation.answers else None,
                    "reward": evaluation.rewards[at], "correct": evaluation.correct[at],
                    "length": evaluation.lengths[at], "truncated": evaluation.truncated[at],
                }
            )  # fmt: skip
    schema = pa.schema(
        [("task", pa.string()), ("kind", pa.string()), ("row", pa.int32()), ("sample", pa.int32()),
         ("query", pa.string()), ("gold", pa.string()), ("completion", pa.string()), ("answer", pa.string()),
         ("reward", pa.float64()), ("correct", pa.bool_()), ("length", pa.int32()), ("truncated", pa.bool_())]
    )  # fmt: skip
    (folder / RESPONSES).mkdir(parents=True, exist_ok=True)
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(table, schema), buffer)
    write_whole(folder / RESPONSES / f"{name}.parquet", buffer.getvalue().to_pybytes())


def _text(value: object) -> str | None:
    return None if value is None else encodable(str(value))


def write_eval(folder: Path, header: Mapping[str, Any], tasks: Mapping[str, TaskResult]) -> None:
    """Writes ``eval.json``: header, and the results of all tasks so far."""
    stored = {**header, "tasks": {name: result.as_json() for name, result in tasks.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / EVAL, json.dumps(stored, indent=1, allow_nan=False) + "\n")


def read_eval_file(path: Path) -> tuple[dict[str, Any], dict[str, TaskResult]]:
    """The header and the results of an ``eval.json``, or of the folder that holds one.

    Raises:
        ValueError: it can't be read, or is no ``eval.json``.
    """
    path = path / EVAL if path.is_dir() else path
    try:
        stored = json.loads(path.read_text())
        tasks = {name: TaskResult.from_json(result) for name, result in stored.pop("tasks").items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} can't be read as an evaluation: {type(error).__name__}: {error}") from error
    return stored, tasks


def results_table(model: str, tasks: Mapping[str, TaskResult]) -> Table:
    """The table of all scores, one a line."""
    table = Table("task", "score", "mean", "95 % interval", "rows", title=model, title_justify="left")
    for name, result in tasks.items():
        for score in result.scores:
            if estimate := result.estimate(score):
                interval = f"{estimate.low:.3f} to {estimate.high:.3f}"
                judged = sum(not math.isnan(value) for value in result.scores[score])
                table.add_row(name, score, f"{estimate.mean:.3f}", interval, str(judged))
    return table


def comparison_table(
    names: tuple[str, str], first: Mapping[str, TaskResult], second: Mapping[str, TaskResult]
) -> Table:
    """The paired gains from the first evaluation to the second, with a verdict in words for each.

    Raises:
        ValueError: they share no task, or had other rows.
    """
    if not (shared := [name for name in first if name in second]):
        raise ValueError(f"no task is in both: {', '.join(first) or 'none'} and {', '.join(second) or 'none'}")
    table = Table("task", "score", "A", "B", "B - A", "95 % interval", "B is", title=f"A: {names[0]}\nB: {names[1]}")
    for name in shared:
        a, b = first[name], second[name]
        if a.row_ids != b.row_ids:
            raise ValueError(
                f"{name}: A has {len(a.row_ids)} rows and B {len(b.row_ids)}, and they are not the same ones in the "
                "same order; evaluate both with the same rows=, path= and prompts"
            )
        for score in (score for score in a.scores if score in b.scores):
            before, after = np.asarray(a.scores[score]), np.asarray(b.scores[score])
            both = ~(np.isnan(before) | np.isnan(after))
            if both.sum() < 2 or score == "tied":
                continue
            gain = paired_gain(before[both].tolist(), after[both].tolist())
            means = [f"{values[both].mean():.3f}" for values in (before, after)]
            table.add_row(
                name, score, *means, f"{gain.mean:+.3f}", f"{gain.low:+.3f} to {gain.high:+.3f}", gain.verdict
            )
    return table
