"""Source: where rows come from, and the reading of files and data sets, of which `grpo_rl.envs.tables` makes rows."""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Endings of compressed files of text, behind that of their format, and what opens them."""
_FORMATS = ".jsonl, .json, .csv, .parquet"
_OTHERS = "; env.subset, env.split and env.eval_split choose others"
HUB_PREFIX = "hf:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
Choose = Callable[[Sequence[str]], Sequence[str]]
"""Chooses the columns to read from those that are there; others may be larger than memory."""
LOADED: dict[tuple[str, str | None], str] = {}
"""The commit of each data set of the hub that this process has read, by its name and ``env.revision``."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Row(dict):
    """A row with its place, a file and a line, and the names of all columns that it has there, read or not."""

    __slots__ = ("columns", "where")

    def __init__(self, values: Mapping[str, Any], where: str, columns: Sequence[str]) -> None:
        super().__init__(values)
        self.where, self.columns = where, columns

    def now(self, values: Mapping[str, Any]) -> Row:
        """Other values in the same place."""
        return Row(values, self.where, self.columns)


@dataclass(frozen=True)
class Source:
    """``env``'s ``path``, ``subset``, ``split``, ``revision`` and ``columns``; without a path: a task's own data."""

    path: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, path: AnySource) -> Source:
        """A source itself, or that of a path alone."""
        return path if isinstance(path, Source) else cls(None if path is None else str(path))

    def refuse(self, what: str, *names: str) -> None:
        """Raises ValueError where one of these settings is given, as ``what`` has none."""
        if given := [name for name in names if getattr(self, name)]:
            raise ValueError(f"the {given[0]} {getattr(self, given[0])} means nothing for {what}")


AnySource = str | Path | Source | None
"""A path, a source with more to say, or a task's own data."""


def read(source: Source, split: str, choose: Choose, texts: Sequence[str] = ()) -> list[Row]:
    """Every row of a source that has a path; ``texts`` are columns that are texts in CSV files, too.

    Raises:
        ValueError: there is no such file, data set or split, or it can't be read.
    """
    assert source.path is not None
    file, split = Path(os.path.expanduser(source.path)), source.split or split
    if repository_of(source.path):
        return _of_hub(source, split, choose)
    if file.is_dir():
        return _of_folder(file, source, split, choose, texts)
    source.refuse("files, which are one split", "subset", "split", "revision")
    files = [file]
    if not file.exists() and glob.has_magic(source.path):
        files = [Path(name) for name in sorted(glob.glob(str(file), recursive=True)) if Path(name).is_file()]
        if not files:
            raise ValueError(f"{source.path} matches no file; it is looked for in {Path.cwd()}")
    return [row for file in files for row in _of_file(file, choose, texts)]


def repository_of(path: str | None) -> str | None:
    """The repository of the hub that a path names, by ``hf:`` or where no file has that name; None: it names none.

    >>> repository_of("hf:openai/gsm8k:main"), repository_of("openai/gsm8k"), repository_of("my/own/rows.jsonl")
    ('openai/gsm8k', 'openai/gsm8k', None)
    """
    if path is None:
        return None
    name = path.removeprefix(HUB_PREFIX)
    if name == path:
        file = Path(os.path.expanduser(path))
        if not _HUB_NAME.fullmatch(path) or _ending(file) or file.exists():
            return None
    return name.partition(":")[0]


def _ending(file: Path) -> str | None:
    found = re.search(r"\.(jsonl|json|csv|parquet)(\.(gz|bz2|xz))?$", file.name.lower())
    return found and found[1]


def _of_file(file: Path, choose: Choose, texts: Sequence[str]) -> list[Row]:
    ending = _ending(file)
    if ending is None:
        others = "no folder or pattern of such files, and no hub name (owner/name)"
        raise ValueError(f"{file} is no file that ends in {_FORMATS}, {others}")
    if ending in ("jsonl", "json"):
        return _of_json(file, choose)
    # Otherwise the texts "None" and "NA" of a CSV file would be read as nothing.
    options = {"keep_default_na": False, "converters": dict.fromkeys(texts, str)} if ending == "csv" else {}
    data = _loaded(str(file), "", ending, data_files=glob.escape(str(file)), split="train", **options)
    return _of_table(data, str(file), choose)


def _loaded(what: str, remedy: str, *named: str | None, **options: Any) -> Any:
    """The table that `datasets` reads; it takes a second to import, which other files need not pay."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from httpx2 import HTTPError  # what huggingface_hub raises

    try:
        return load_dataset(*named, **options)
    except (DatasetsError, HTTPError, OSError, ValueError) as error:
        raise ValueError(f"{what} can't be read: {error.__cause__ or error}{remedy}") from error


def _of_json(file: Path, choose: Choose) -> list[Row]:
    """The rows of one object a line, or of one list of objects; `datasets` would make dates of texts, and no lines."""
    try:
        with PACKED.get(file.suffix.lower(), open)(file, "rt", encoding="utf-8-sig") as opened:
            text = opened.read()
    # Each way of compression has errors of its own.
    except Exception as error:
        raise ValueError(f"{file} can't be read: {error}") from error
    if text.lstrip().startswith("["):
        found = ((f"{file}, row {index}", row) for index, row in enumerate(_parsed(text, str(file))))
    else:
        # Not splitlines(), which also breaks at characters that a JSON string may hold.
        lines = ((f"{file}, line {number}", line) for number, line in enumerate(text.split("\n"), 1))
        found = ((where, _parsed(line, where)) for where, line in lines if line.strip())
    rows: list[Row] = []
    for where, row in found:
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no object with columns by their names, but {str(row)[:80]!r}")
        chosen = {name: row[name] for name in choose(tuple(row))}
        try:
            json.dumps(chosen, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # JSON can write what no tokenizer reads
            half = ascii(error.object[error.start])
            raise ValueError(f"{where} has half of a character, {half}, as of an emoji cut in two") from error
        rows.append(Row(chosen, where, tuple(row)))
    return rows


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); give one object a line, or a list of objects") from error


def _of_folder(folder: Path, source: Source, split: str, choose: Choose, texts: Sequence[str]) -> list[Row]:
    """The rows of what `datasets` saved, of a subset by the folder's card, or of files by the splits in their names."""
    from datasets import DatasetDict, load_from_disk
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    if source.subset:
        data = _loaded(f"{folder}, split {split},", _OTHERS, str(folder), source.subset, split=split)
        return _of_table(data, f"{folder} {split}", choose)
    by_split: dict[str, Any] = {}
    if saved := (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        data = load_from_disk(str(folder))
        parts = data if isinstance(data, DatasetDict) else {"train": data}
        by_split = {str(name): part for name, part in parts.items()}
    else:
        endings = [f".{name}{packed}" for name in ("jsonl", "json", "csv", "parquet") for packed in ("", *PACKED)]
        with contextlib.suppress(EmptyDatasetError, FileNotFoundError):
            patterns = get_data_patterns(str(folder))
            found = DataFilesDict.from_patterns(patterns, base_path=str(folder), allowed_extensions=endings)
            by_split = {str(name): files for name, files in found.items() if files}
    if not by_split:
        raise ValueError(f"{folder} is a folder without files that end in {_FORMATS}")
    # One split alone is read for any, as a file is, unless a setting names another.
    if split not in by_split and not source.split and len(by_split) == 1:
        (split,) = by_split
    if split not in by_split:
        remedy = "set env.split, and env.eval_split for the held-out rows"
        raise ValueError(f"{folder} has no split {split}; it has {', '.join(by_split)}: {remedy}")
    if saved:
        return _of_table(by_split[split], f"{folder} {split}", choose)
    return [row for file in sorted(by_split[split]) for row in _of_file(Path(file), choose, texts)]


def _of_hub(source: Source, split: str, choose: Choose) -> list[Row]:
    from grpo_rl.storage.hub import why_no_hub  # it imports huggingface_hub

    name, _, subset = str(source.path).removeprefix(HUB_PREFIX).partition(":")
    why_no_hub()  # without a network `datasets` looks into its cache at once
    remedy = f"{_OTHERS}; with a copy of it, set env.path=FILE.jsonl, and env.eval_path for the held-out rows"
    what = f"{name}, split {split}, of the hub"
    data = _loaded(what, remedy, name, source.subset or subset or None, split=split, revision=source.revision)
    # Not the commit that the hub's cache has for the branch: offline `datasets` takes the newest copy of its own cache.
    folders = {Path(file["filename"]).parent.name for file in data.cache_files}
    if len(folders) == 1 and _COMMIT.fullmatch(commit := folders.pop()):
        LOADED[name, source.revision] = commit
    return _of_table(data, f"{name} {split}", choose)


def _of_table(data: Any, where: str, choose: Choose) -> list[Row]:
    present = tuple(data.column_names)
    rows = data.select_columns(list(choose(present))).to_list()
    return [Row(row, f"{where}, row {index}", present) for index, row in enumerate(rows)]
