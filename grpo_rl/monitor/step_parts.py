"""StepParts: a log of a run as a Parquet dataset, a folder with one part a step; and two such logs.

``pandas.read_parquet("completions.parquet")`` reads the whole folder. A part appears under its name only once it is
complete, so a run that is killed loses at most the step it was in, and resuming deletes whole parts.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_rl.storage.whole_file import replacing

COMPLETIONS_FOLDER, TOKENS_FOLDER = "completions.parquet", "tokens.parquet"
HELD_OUT_FOLDER, SAMPLING_FOLDER = "held_out.parquet", "sampling.parquet"
STEP_FOLDERS = (COMPLETIONS_FOLDER, TOKENS_FOLDER, HELD_OUT_FOLDER, SAMPLING_FOLDER)
"""Folders of this kind in a run's folder."""

HELD_OUT = pa.schema(
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
SAMPLING = pa.schema(
    [
        ("step", pa.int64()),
        ("engine", pa.string()),
        ("group_id", pa.int64()),
        ("policy_version", pa.int64()),
        ("begun_s", pa.float64()),
        ("ended_s", pa.float64()),
    ]
)

_PART = re.compile(r"part-(\d+)\.parquet")


class StepParts:
    """The parts ``part-<step>.parquet`` of one folder, which the first part makes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, step: int) -> Path:
        """The file of a step's part."""
        return self.folder / f"part-{step:08d}.parquet"

    def steps(self) -> list[int]:
        """Steps that have a part, in order; empty where there is none."""
        return [number for number, _ in self._parts()]

    def write(self, step: int, table: pa.Table) -> None:
        """Writes a step's part; the same step again replaces it.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # Bytes of equal weight compress together: a log-probability's exponents are alike, its digits are not.
        floats = [field.name for field in table.schema if field.type == pa.float32()]
        others = [name for name in table.schema.names if name not in floats]
        with replacing(self.path(step)) as temporary:
            pq.write_table(table, temporary, compression="zstd", use_dictionary=others, use_byte_stream_split=floats)

    def write_rows(self, step: int, rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> None:
        """Writes rows, which have the schema's columns but ``step``, as a step's part."""
        table = [
            {name: encodable(value) if isinstance(value, str) else value for name, value in row.items()}
            | {"step": step}
            for row in rows
        ]
        self.write(step, pa.Table.from_pylist(table, schema=schema))

    def read(self, step: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The table of one step, without reading the others; of ``columns`` those that the part has.

        Raises:
            ValueError: there is no part of the step, or it can't be read; names it.
        """
        path = self.path(step)
        try:
            with pq.ParquetFile(path) as file:  # a tenth of the time of `read_table`, which looks for a dataset
                names = file.schema_arrow.names
                return file.read(None if columns is None else [name for name in columns if name in names])
        # Where a file is cut or damaged decides which of them it is.
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} can't be read ({error}); remove it to do without what it holds") from error

    def truncate(self, step: int) -> None:
        """Drops the parts after ``step`` and what a killed run left half written."""
        for number, part in self._parts():
            if number > step:
                part.unlink()
        for temporary in self.folder.glob(".part-*.tmp"):
            temporary.unlink()

    def _parts(self) -> list[tuple[int, Path]]:
        found = [(match, path) for path in self.folder.glob("part-*.parquet") if (match := _PART.fullmatch(path.name))]
        return sorted((int(match[1]), path) for match, path in found)


def write_held_out(run_dir: Path, step: int, evaluation: Any, gold: Sequence[object]) -> None:
    """Writes ``held_out.parquet/part-<step>.parquet``, a row a held-out row, in the order of ``evaluation.json``.

    Null stands for the reward of a response, or the gold answer of a row, that has none. Step 0 is before training.

    Args:
        evaluation: a `grpo_rl.training.evaluate.Evaluation`.

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
    rows = [{"row": number, **row} for number, row in enumerate(rows)]
    StepParts(run_dir / HELD_OUT_FOLDER).write_rows(step, rows, HELD_OUT)


def write_sampling(run_dir: Path, step: int, sampled: Sequence[Any], zero: float) -> None:
    """Writes ``sampling.parquet/part-<step>.parquet``, a row a group that an engine was done with by the step's end.

    Nothing is written where nothing was sampled meanwhile, as in synchronous training. Times are in seconds since the
    run's start, like the metric ``time/at_s``. ``policy_version`` is that of the engine's weights when it began; pushes
    may have changed it before the group was complete.

    Args:
        sampled: as `grpo_rl.collectors.base.Sampled`.
        zero: the run's clock, less ``time.perf_counter()``.
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
        StepParts(run_dir / SAMPLING_FOLDER).write_rows(step, rows, SAMPLING)


def encodable(text: str) -> str:
    """The text as UTF-8 can hold it: byte-level tokens cut in the middle of a character can decode to lone surrogates.

    >>> encodable("a\\ud800b")
    'a?b'
    """
    return text.encode("utf-8", "replace").decode()
