"""Times at which engines sampled while the trainer trained, as a Parquet dataset (`grpo_rl.monitor.step_parts`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo_rl.monitor.step_parts import SAMPLING_FOLDER, StepParts

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("engine", pa.string()),
        ("group_id", pa.int64()),
        ("policy_version", pa.int64()),
        ("begun_s", pa.float64()),
        ("ended_s", pa.float64()),
    ]
)


class SamplingLog:
    """Writes ``sampling.parquet/part-<step>.parquet``, a row a group that an engine was done with by the step's end.

    Times are in seconds since the run's start, like the metric ``time/at_s``. ``policy_version`` is that of the
    engine's weights when it began; pushes may have changed it before the group was complete.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._parts = StepParts(Path(run_dir) / SAMPLING_FOLDER)

    def write(self, step: int, sampled: Sequence[Any], zero: float) -> None:
        """Writes the step's part; none where nothing was sampled meanwhile, as in synchronous training.

        Args:
            sampled: as `grpo_rl.collectors.base.Sampled`.
            zero: the run's clock, less ``time.perf_counter()``.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        rows = [
            {
                "engine": group.engine,
                "group_id": group.group_id,
                "policy_version": group.version,
                "begun_s": zero + group.begun_s,
                "ended_s": zero + group.ended_s,
            }
            for group in sampled
        ]
        if rows:
            self._parts.write_rows(step, rows, SCHEMA)
