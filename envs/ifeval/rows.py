"""Rows of IFEval: from the hub, which has one split, or from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from grpo_rl.envs.ifeval.verdicts import parse

COLUMNS = {"key": (int, str), "prompt": str, "instruction_id_list": list, "kwargs": list}
HUB_NAME = "google/IFEval"
SPLITS = ("train", "test")
TEST_SHARE = 0.2
SPLIT_SEED = 7
"""With it, 105 of the 541 rows are held out, and each of the 25 types of instructions is among them at least twice."""


def load_rows(path: str | Path | None = None, split: str = "train") -> list[dict]:
    """Prompts with their instructions: ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs``.

    Args:
        path: a JSONL file of these columns; None takes ``google/IFEval`` from the hub (or its cache).
        split: of the hub's data, ``train`` or ``test``, parted by :func:`split_of`; a file is one split.

    Raises:
        ValueError: there is no such file or split, the hub can't be reached, or a row lacks a column, has an unknown
            instruction or lacks one of its arguments.
    """
    if split not in SPLITS:
        raise ValueError(f"IFEval has no split {split!r}; it has {' and '.join(SPLITS)}")
    if path is None:
        return [row for row in _checked(_hub_rows(), HUB_NAME) if split_of(row["key"]) == split]
    file = Path(path).expanduser()
    try:
        with file.open(encoding="utf-8-sig") as lines:
            return _checked(_json_rows(lines, file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"env.path={path} can't be read: {error}; give a JSONL file with {', '.join(COLUMNS)}"
        ) from error


def split_of(key: int | str) -> str:
    """``test`` for a fifth of all keys, ``train`` for the others; always the same ones, whatever the other rows are.

    IFEval was published as one split, and what was trained on can't be what is measured.

    >>> [key for key in range(1000, 1020) if split_of(key) == "test"]
    [1000, 1005, 1012]
    """
    return "test" if random.Random(f"{SPLIT_SEED}/{key}").random() < TEST_SHARE else "train"


def check_row(row: object, where: str) -> None:
    """Raises ValueError unless ``row`` has its columns, and instructions that can be checked."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is no object with {', '.join(COLUMNS)}, but {str(row)[:80]!r}")
    for column, kind in COLUMNS.items():
        if column not in row:
            raise ValueError(f"{where} has no {column}; its columns are {list(row)}; rename or add the column")
        if not isinstance(row[column], kind):
            raise ValueError(f"{where}: {column} is {str(row[column])[:80]!r}, of type {type(row[column]).__name__}")
    parse(row["instruction_id_list"], row["kwargs"], f"{where} (key {row['key']})")


def _checked(rows: Iterable[tuple[str, dict]], source: str) -> list[dict]:
    checked = []
    for where, row in rows:
        check_row(row, where)
        checked.append(dict(row))
    if not checked:
        raise ValueError(f"{source} has no rows")
    return checked


def _json_rows(lines: Iterable[str], file: Path) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            yield where, json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON ({error}); each line is one object") from error


def _hub_rows() -> Iterator[tuple[str, dict]]:
    # Imported here: it takes a second, which a local file need not pay.
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from httpx2 import HTTPError  # what huggingface_hub raises

    try:
        data = load_dataset(HUB_NAME, split="train")
    except (ConnectionError, DatasetNotFoundError, HTTPError) as error:
        raise ValueError(
            f"{HUB_NAME} can't be had from the hub ({error}); with a copy of it, set env.path=FILE.jsonl "
            "(and env.eval_path for the held-out rows)"
        ) from error
    for index, row in enumerate(data):
        yield f"{HUB_NAME}, row {index}", dict(row)
