"""Held-out responses of each evaluation, step 0: before training; a Parquet dataset (`grpo_rl.monitor.step_parts`)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo_rl.monitor.step_parts import HELD_OUT_FOLDER, StepParts

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


class HeldOutLog:
    """Writes ``held_out.parquet/part-<step>.parquet``, a row a held-out row, in the order of ``evaluation.json``."""

    def __init__(self, run_dir: str | Path) -> None:
        self._parts = StepParts(Path(run_dir) / HELD_OUT_FOLDER)

    def write(self, step: int, evaluation: Any, gold: Sequence[object]) -> None:
        """Writes the responses of a `grpo_rl.training.evaluate.Evaluation`, and the gold answers of its rows.

        Null stands for the reward of a response, or the gold answer of a row, that has none.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        columns = {
            "prompt": evaluation.prompts,
            "completion": evaluation.completions,
            "answer": [None if answer is None else str(answer) for answer in gold],
            "reward": [None if math.isnan(reward) else reward for reward in evaluation.rewards],
            "tokens": evaluation.lengths,
            "truncated": evaluation.truncated,
        }
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        self._parts.write_rows(step, [{"row": number, **row} for number, row in enumerate(rows)], SCHEMA)
