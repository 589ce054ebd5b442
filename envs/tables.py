"""Rows of any data set: those of a local file, or of a name of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

Kind = type | UnionType
FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def load_rows(
    path: str | Path | None = None, split: str = "train", columns: Collection[str] | None = None
) -> list[dict]:
    """Rows of a local file or of a data set of the hub, as they stand there.

    Args:
        path: a file, JSONL, JSON (a list of objects), CSV or Parquet, by its ending; or a hub name, ``owner/name`` or
            ``owner/name:configuration``, such as ``trl-lib/tldr``.
        split: of the hub's data; a file is one split.
        columns: which to read, as far as they are there; others may be larger than memory. None reads all.

    Raises:
        ValueError: no path is given, there is no such file or data set or split, or it can't be read or is empty.

    >>> from grpo_rl.envs.gsm8k import SHIPPED
    >>> list(load_rows(SHIPPED["quickstart-test"])[0])
    ['question', 'answer']
    """
    if path is None:
        raise ValueError(
            "prompt_response has no data of its own; set env.path to a JSONL, JSON, CSV or Parquet file, or to a hub "
            "name such as trl-lib/tldr"
        )
    file = Path(path).expanduser()
    ending = file.suffix.lower()
    if ending in (".jsonl", ".json"):
        # Not by `datasets`, which reads texts that look like dates as dates.
        rows = [{name: row[name] for name in _wanted(row, columns)} for _, row in file_rows(file, "a prompt")]
    elif ending in FORMATS:
        rows = _table(file, columns)
    elif not file.exists() and is_hub_name(str(path)):
        data = hub_data(str(path), split)
        rows = data.select_columns(_wanted(data.column_names, columns)).to_list()
    else:
        raise ValueError(f"env.path={path} is no file that ends in {', '.join(FORMATS)}, and no hub name (owner/name)")
    if not rows:
        raise ValueError(f"env.path={path} has no rows")
    return rows


def is_hub_name(path: str) -> bool:
    """Tells whether a path has the form of a name of the hub.

    >>> is_hub_name("trl-lib/tldr"), is_hub_name("my/own/rows")
    (True, False)
    """
    return bool(_HUB_NAME.fullmatch(path))


def _wanted(present: Iterable[str], columns: Collection[str] | None) -> list[str]:
    """The columns to read; all where none of those wanted is there, so that a message can tell what is."""
    present = list(present)
    return [name for name in present if columns is None or name in columns] or present


def _table(file: Path, columns: Collection[str] | None) -> list[dict]:
    # Imported here: it takes a second, which other files need not pay.
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    ending = file.suffix.lower()
    # Otherwise the texts "None" and "NA" of a CSV file would be read as nothing.
    options = {"keep_default_na": False} if ending == ".csv" else {}
    try:
        data = load_dataset(ending[1:], data_files=str(file), split="train", **options)
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"env.path={file} can't be read: {error.__cause__ or error}") from error
    return data.select_columns(_wanted(data.column_names, columns)).to_list()


def hub_data(path: str, split: str) -> Any:
    """A split of a data set of the hub, or of its cache.

    Raises:
        ValueError: there is no such data set or split, or the hub can't be reached.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from httpx2 import HTTPError  # what huggingface_hub raises

    name, _, configuration = path.partition(":")
    try:
        return load_dataset(name, *filter(None, [configuration]), split=split)
    except (ConnectionError, DatasetsError, HTTPError) as error:
        raise ValueError(
            f"{path} can't be had from the hub ({error}); with a copy of it, set env.path=FILE.jsonl "
            "(and env.eval_path for the held-out rows)"
        ) from error
    except ValueError as error:
        # It names the splits and configurations that there are.
        raise ValueError(f"env.path={path}, split {split}: {error}") from error


def file_rows(path: str | Path, columns: str, alternatives: str = "") -> Iterator[tuple[str, dict]]:
    """Each object, with the place where it stands: of a file with one object a line, or with one list of objects.

    Args:
        columns: what an object must have, for messages.
        alternatives: what else ``path`` may be, for messages.

    Raises:
        ValueError: the file can't be read, or something in it is no object.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"env.path={path} can't be read: {error}; give a JSON or JSONL file with {columns}{alternatives}"
        ) from error
    if text.lstrip().startswith("["):
        rows = ((f"{file}, row {index}", row) for index, row in enumerate(_parsed(text, str(file))))
    else:
        rows = _lines(text, file)
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no object with {columns}, but {str(row)[:80]!r}")
        yield where, row


def placed_rows(
    path: str | Path | None, hub: str, split: str, columns: Mapping[str, Kind], alternatives: str = ""
) -> list[tuple[str, dict]]:
    """Each row of a JSON or JSONL file, or of the data set ``hub`` where ``path`` is None, with where it stands.

    Args:
        split: of the hub's data.
        columns: see :func:`check_columns`.
        alternatives: see :func:`file_rows`.

    Raises:
        ValueError: the rows can't be had, there are none, or one lacks a column.
    """
    if path is None:
        rows = [(f"{hub} {split}, row {index}", dict(row)) for index, row in enumerate(hub_data(hub, split))]
    else:
        rows = list(file_rows(path, ", ".join(columns), alternatives))
    if not rows:
        raise ValueError(f"{hub if path is None else path} has no rows")
    for where, row in rows:
        check_columns(row, columns, where)
    return rows


def check_columns(row: object, columns: Mapping[str, Kind], where: str) -> None:
    """Raises ValueError unless ``row`` is an object with these columns, each of its type.

    >>> check_columns({"question": "1 + 1?", "answer": 2}, {"question": str, "answer": str}, "row 0")
    Traceback (most recent call last):
    ...
    ValueError: row 0: answer is 2, of type int; it must be of type str
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is no object with {', '.join(columns)}, but {str(row)[:80]!r}")
    for column, kind in columns.items():
        if column not in row:
            raise ValueError(f"{where} has no {column}; its columns are {list(row)}; rename or add the column")
        if not isinstance(value := row[column], kind):
            raise ValueError(
                f"{where}: {column} is {value!r:.80}, of type {type(value).__name__}; it must be of type "
                f"{getattr(kind, '__name__', kind)}"
            )


def _lines(text: str, file: Path) -> Iterator[tuple[str, object]]:
    # Not splitlines(), which also breaks at characters that a JSON string may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, _parsed(line, where)


def _parsed(text: str, where: str) -> list:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); give one object a line, or a list of objects") from error
