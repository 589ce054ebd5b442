"""Every response of a run, as a Parquet dataset: a folder with one part a step.

``pandas.read_parquet("completions.parquet")`` reads the whole folder. A part appears under its name only once it is
complete, so a run that is killed loses at most the step it was in, and resuming deletes whole parts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_rl.data.group import Group
from grpo_rl.storage.whole_file import replacing

COMPLETIONS_FOLDER = "completions.parquet"

_BEFORE_PARTS = [
    ("step", pa.int64()),
    ("group_id", pa.int64()),
    ("row", pa.int64()),
    ("prompt", pa.string()),
    ("completion", pa.string()),
    ("answer", pa.string()),
    ("reward", pa.float32()),
]
_AFTER_PARTS = [
    ("advantage", pa.float32()),
    ("tokens", pa.int64()),
    ("truncated", pa.bool_()),
    ("policy_version", pa.int64()),
]
_PART = re.compile(r"part-(\d+)\.parquet")

# CSI, OSC, DCS/SOS/PM/APC strings, then the two-byte sequences: ECMA-48, sections 5.3 to 5.6.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)


def completion_rows(
    groups: Sequence[Group], decode: Callable[[Sequence[int]], str], answer: Callable[[int], object] = lambda row: None
) -> list[dict[str, Any]]:
    """One dict a response, with the columns of the Parquet parts but ``step``.

    Args:
        decode: ids -> text, used on prompts and on responses.
        answer: index of a dataset row -> its gold answer, or None where the task has none.

    ``policy_version`` is that of the response's first token: the oldest weights that had a part in it.

    >>> from grpo_rl.testing import random_group
    >>> rows = completion_rows([random_group(lengths=[1, 2], rewards=[0.0, 2.0])], lambda ids: f"{len(ids)} ids")
    >>> [(row["prompt"], row["completion"], row["reward"]) for row in rows]
    [('4 ids', '1 ids', 0.0), ('4 ids', '2 ids', 2.0)]
    """
    rows = []
    for group in groups:
        prompt, gold = decode(group.prompt_ids.tolist()), answer(group.row)
        for g, ids in enumerate(group.responses):
            start = int(group.offsets[g])
            rows.append(
                {
                    "group_id": group.group_id,
                    "row": group.row,
                    "prompt": prompt,
                    "completion": decode(ids.tolist()),
                    "answer": None if gold is None else str(gold),
                    "reward": group.rewards[g].item(),
                    **{f"reward_{name}": part[g].item() for name, part in group.reward_parts.items()},
                    **{f"measure_{name}": values[g].item() for name, values in group.measures.items()},
                    "advantage": None if group.advantages is None else group.advantages[g].item(),
                    "tokens": len(ids),
                    "truncated": None if group.truncated is None else bool(group.truncated[g]),
                    "policy_version": int(group.versions[start]) if len(ids) else None,
                }
            )
    return rows


class CompletionsLog:
    """Writes ``completions.parquet/part-<step>.parquet``, one a step."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / COMPLETIONS_FOLDER
        self.path.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of a step (see :func:`completion_rows`); the same step again replaces them.

        Raises:
            OSError: the disk is full or read-only; names the file.
        """
        # A measure may have no meaning for the responses of some groups.
        parts = list(dict.fromkeys(name for row in rows for name in row if name.startswith(("reward_", "measure_"))))
        # Without a schema a column that is all null in one step would get a type that other parts disagree with.
        schema = pa.schema([*_BEFORE_PARTS, *((name, pa.float32()) for name in parts), *_AFTER_PARTS])
        table = pa.Table.from_pylist([_encodable(row) | {"step": step} for row in rows], schema=schema)
        with replacing(_part(self.path, step)) as temporary:
            pq.write_table(table, temporary, compression="zstd")

    def truncate(self, step: int) -> None:
        """Drops the parts after ``step`` and what a killed run left half written."""
        for number, part in _parts(self.path):
            if number > step:
                part.unlink()
        for temporary in self.path.glob(".part-*.tmp"):
            temporary.unlink()


def logged_steps(run_dir: str | Path) -> list[int]:
    """Steps that have a part, in order; empty where the run wrote none."""
    return [number for number, _ in _parts(Path(run_dir) / COMPLETIONS_FOLDER)]


def read_step(run_dir: str | Path, step: int) -> list[dict[str, Any]]:
    """Rows of one step, without reading the others.

    Raises:
        ValueError: there is no part of the step, or it can't be read; names it.
    """
    path = _part(Path(run_dir) / COMPLETIONS_FOLDER, step)
    try:
        return pq.read_table(path).to_pylist()
    # Where a file is cut or damaged decides which of them it is.
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read ({error}); remove it to do without its responses") from error


def printable(text: str) -> str:
    """Model text that is safe to show: no escape sequences, control or invisible formatting characters.

    A model can emit the bytes that clear a terminal, retitle its window, or reverse the direction of text. Line breaks
    stay, tabs become spaces.

    >>> printable("\\x1b[2J\\x1b]0;title\\x07red: \\x1b[31m4\\x1b[0m\\u202e\\tend")
    'red: 4 end'
    """
    text = _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\t", " "))
    return "".join(c for c in text if c == "\n" or not unicodedata.category(c).startswith("C"))


def _part(folder: Path, step: int) -> Path:
    return folder / f"part-{step:08d}.parquet"


def _parts(folder: Path) -> list[tuple[int, Path]]:
    found = [(match, path) for path in folder.glob("part-*.parquet") if (match := _PART.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def _encodable(row: dict[str, Any]) -> dict[str, Any]:
    # Byte-level tokens cut in the middle of a character can decode to a lone surrogate, which UTF-8 cannot hold.
    return {k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in row.items()}
