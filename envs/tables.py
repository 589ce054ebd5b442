"""Rows of any data set: a local file, or a name of the hub."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_rl.envs.rows import file_rows

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def load_rows(path: str | Path | None = None, split: str = "train") -> list[dict]:
    """Rows of a local file or of a data set of the hub, as they stand there.

    Args:
        path: a file, JSONL, JSON (a list of objects), CSV or Parquet, by its ending; or a hub name, ``owner/name`` or
            ``owner/name:configuration``, such as ``trl-lib/tldr``.
        split: of the hub's data; a file is one split.

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
        rows = [row for _, row in file_rows(file, "a prompt")]
    elif ending in FORMATS:
        rows = _table(file)
    elif not file.exists() and _HUB_NAME.fullmatch(str(path)):
        rows = _hub_rows(str(path), split)
    else:
        raise ValueError(f"env.path={path} is no file that ends in {', '.join(FORMATS)}, and no hub name (owner/name)")
    if not rows:
        raise ValueError(f"env.path={path} has no rows")
    return rows


def _table(file: Path) -> list[dict]:
    # Imported here: it takes a second, which other files need not pay.
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    ending = file.suffix.lower()
    # Otherwise the texts "None" and "NA" of a CSV file would be read as nothing.
    options = {"keep_default_na": False} if ending == ".csv" else {}
    try:
        return load_dataset(ending[1:], data_files=str(file), split="train", **options).to_list()
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"env.path={file} can't be read: {error.__cause__ or error}") from error


def _hub_rows(path: str, split: str) -> list[dict]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from httpx2 import HTTPError  # what huggingface_hub raises

    name, _, configuration = path.partition(":")
    try:
        return load_dataset(name, configuration or None, split=split).to_list()
    except (ConnectionError, DatasetsError, HTTPError) as error:
        raise ValueError(f"{path} can't be had from the hub ({error}); with a copy of it, set env.path=FILE") from error
    except ValueError as error:
        # It names the splits and configurations that there are.
        raise ValueError(f"env.path={path}, split {split}: {error}") from error
