"""Rows of IFEval, from the hub, which has one split, or from a file."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from grpo_rl.envs import tables
from grpo_rl.envs.ifeval.verdicts import parse

COLUMNS = {"key": (int, str), "prompt": str, "instruction_id_list": list, "kwargs": list}
HUB_NAME = "google/IFEval"
SPLITS = ("train", "test")
TEST_SHARE = 0.2
SPLIT_SEED = 7
"""The seed of the split, by which 105 of 541 rows are held out, two or more of each of the 25 types of instructions."""


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
        hub = ((f"{HUB_NAME}, row {index}", row) for index, row in enumerate(tables.hub_data(HUB_NAME, "train")))
        return [row for row in tables.checked_rows(hub, check_row, HUB_NAME) if split_of(row["key"]) == split]
    lines = tables.line_rows(path, f"a JSONL file with {', '.join(COLUMNS)}")
    return tables.checked_rows(lines, check_row, str(path))


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
