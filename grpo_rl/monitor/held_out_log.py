"""Held-out responses of each evaluation, step 0: before training; a Parquet dataset (`grpo_rl.monitor.step_parts`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from grpo_rl.monitor.step_parts import HELD_OUT_FOLDER, StepParts, encodable

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("row", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float32()),
        ("tokens", pa.int32()),
        ("truncated", pa.bool_()),
    ]
)


class Evaluated(Protocol):
    """The outcome of an evaluation: `grpo_rl.training.evaluate.Evaluation`."""

    rewards: list[float]
    prompts: list[str]
    completions: list[str]
    lengths: list[int]
    truncated: list[bool]


class HeldOutLog:
    """Writes ``held_out.parquet/part-<step>.parquet``, a row a held-out row, in the order of ``evaluation.json``."""

    def __init__(self, run_dir: str | Path) -> None:
        self._parts = StepParts(Path(run_dir) / HELD_OUT_FOLDER)

    def write(self, step: int, evaluation: Evaluated, gold: Sequence[object]) -> None:
        """Writes the responses of an evaluation; null stands for the reward of a response that has none.

        Args:
            gold: gold answers of the rows, None for a row without one.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        rows = zip(
            evaluation.prompts,
            evaluation.completions,
            gold,
            evaluation.rewards,
            evaluation.lengths,
            evaluation.truncated,
            strict=True,
        )
        table = [
            {
                "step": step,
                "row": number,
                "prompt": encodable(prompt),
                "completion": encodable(completion),
                "answer": None if answer is None else encodable(str(answer)),
                "reward": None if math.isnan(reward) else reward,
                "tokens": tokens,
                "truncated": truncated,
            }
            for number, (prompt, completion, answer, reward, tokens, truncated) in enumerate(rows)
        ]
        self._parts.write(step, pa.Table.from_pylist(table, schema=SCHEMA))
