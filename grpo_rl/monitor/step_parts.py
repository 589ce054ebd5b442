"""StepParts: a log of a run as a Parquet dataset, a folder with one part a step.

``pandas.read_parquet("completions.parquet")`` reads the whole folder. A part appears under its name only once it is
complete, so a run that is killed loses at most the step it was in, and resuming deletes whole parts.
"""

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


def encodable(text: str) -> str:
    """The text as UTF-8 can hold it: byte-level tokens cut in the middle of a character can decode to lone surrogates.

    >>> encodable("a\\ud800b")
    'a?b'
    """
    return text.encode("utf-8", "replace").decode()
