"""Times at which engines sampled while the trainer trained, as a Parquet dataset (`grpo_rl.monitor.step_parts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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

    def write(self, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        """Writes the step's part; none where there are no rows, as in synchronous training.

        Args:
            rows: with the columns of :data:`SCHEMA` but ``step``.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        if rows:
            self._parts.write_rows(step, rows, SCHEMA)
