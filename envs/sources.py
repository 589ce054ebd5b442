"""Source: where rows come from, and the reading of files and data sets, of which `grpo_rl.envs.tables` makes rows."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
PACKED = (".gz", ".bz2", ".xz")
"""Endings of compressed files of text, behind that of their format."""
HUB_PREFIX = "hf:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
Choose = Callable[[tuple[str, ...]], Sequence[str]]
"""Chooses the columns to read from those that are there."""
LOADED: dict[tuple[str, str | None], str] = {}
"""The commit of each data set of the hub that this process has read, by its name and ``env.revision``."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
Placed = tuple[str, dict, Sequence[str]]
"""A row: the place where it stands, its values, and the names of all columns that it has there."""


@dataclass(frozen=True)
class Source:
    """A source of rows: a path or hub name, and what of it is read under which names.

    Args:
        path: a file, a folder, a pattern of files (``data/*.jsonl``), or a hub name: ``hf:owner/name``, or without
            ``hf:`` where no file has that name. None: the task's own data.
        subset: configuration of the hub's data, or of a folder with a data set card.
        split: read instead of the split that the task reads for training, or for evaluation.
        revision: commit, tag or branch of the hub's data; a commit pins it.
        columns: the data's name of a column, by the name that the task uses.
        keys: settings that these come from where they are not those of ``env`` with the same name, for messages.

    >>> Source.of("rows.jsonl").path
    'rows.jsonl'
    """

    path: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, path: str | Path | Source | None) -> Source:
        """A source itself, or that of a path alone."""
        return path if isinstance(path, Source) else cls(None if path is None else str(path))

    def key(self, name: str) -> str:
        """The setting that one of these comes from.

        >>> source = Source("rows.jsonl", keys={"path": "env.eval_path"})
        >>> source.key("path"), source.key("split")
        ('env.eval_path', 'env.split')
        """
        return self.keys.get(name, f"env.{name}")

    def refuse(self, what: str, names: Collection[str] = ("subset", "split", "revision", "columns")) -> None:
        """Raises ValueError where one of these settings is given, as ``what`` has none."""
        if given := [name for name in names if getattr(self, name)]:
            raise ValueError(f"{self.key(given[0])}={getattr(self, given[0])} means nothing for {what}")


def read(source: Source, split: str, choose: Choose = tuple, texts: Sequence[str] = ()) -> list[Placed]:
    """Every row of a source that has a path.

    Args:
        split: of a folder with several, or of the hub's data, unless the source has its own; a file is one split.
        choose: which of the columns that are there to read; others may be larger than memory.
        texts: columns that are texts in CSV files too, where they look like numbers.

    Raises:
        ValueError: there is no such file, data set or split, or it can't be read; or the source has a setting that
            means nothing there.
    """
    assert source.path is not None
    path, file, key = source.path, Path(os.path.expanduser(source.path)), source.key("path")
    if path.startswith(HUB_PREFIX):
        return _of_hub(path.removeprefix(HUB_PREFIX), source, split, choose)
    if file.is_dir():
        return _of_folder(file, source, split, choose, texts)
    files = [file]
    if not file.exists() and glob.has_magic(path):
        files = [Path(name) for name in sorted(glob.glob(str(file), recursive=True)) if Path(name).is_file()]
        if not files:
            raise ValueError(f"{key}={path} matches no file; it is looked for in {Path.cwd()}")
    elif format_of(file) is None:
        if not file.exists() and is_hub_name(path):
            return _of_hub(path, source, split, choose)
        raise ValueError(f"{key}={path} is no {_KINDS}")
    source.refuse("files, which are one split", ("subset", "split", "revision"))
    return [row for file in files for row in _of_file(file, key, choose, texts)]


_KINDS = f"file that ends in {', '.join(FORMATS)}, no folder or pattern of such files, and no hub name (owner/name)"


def repository_of(path: str | None) -> str | None:
    """The repository of the hub that a path names; None: it names none.

    >>> repository_of("hf:openai/gsm8k:main"), repository_of("openai/gsm8k"), repository_of("rows.jsonl")
    ('openai/gsm8k', 'openai/gsm8k', None)
    """
    if path is None or not path.startswith(HUB_PREFIX):
        local = path is None or format_of(Path(path)) is not None or os.path.exists(os.path.expanduser(path))
        if path is None or local or not is_hub_name(path):
            return None
    return path.removeprefix(HUB_PREFIX).partition(":")[0]


def is_hub_name(path: str) -> bool:
    """True if a path has the form of a name of the hub.

    >>> is_hub_name("trl-lib/tldr"), is_hub_name("my/own/rows")
    (True, False)
    """
    return bool(_HUB_NAME.fullmatch(path))


def format_of(file: Path) -> str | None:
    """The format that a file's name tells, compressed or not; None: another one.

    >>> format_of(Path("rows.jsonl.gz")), format_of(Path("ROWS.CSV")), format_of(Path("rows.txt"))
    ('.jsonl', '.csv', None)
    """
    *_, first, last = ["", "", *(suffix.lower() for suffix in file.suffixes)]
    ending = first if last in PACKED else last
    return ending if ending in FORMATS else None


def _of_file(file: Path, key: str, choose: Choose, texts: Sequence[str]) -> list[Placed]:
    ending = format_of(file)
    if ending in (".jsonl", ".json"):
        # Not by `datasets`, which reads texts that look like dates as dates.
        return [
            (where, {name: _whole(row[name], name, where) for name in choose(tuple(row))}, tuple(row))
            for where, row in json_rows(file, key)
        ]
    # Imported here: it takes a second, which other files need not pay.
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    if ending is None:
        raise ValueError(f"{key}={file} is no {_KINDS}")
    # Otherwise the texts "None" and "NA" of a CSV file would be read as nothing.
    csv = {"keep_default_na": False, "converters": dict.fromkeys(texts, str)}
    options = csv if ending == ".csv" else {}
    try:
        data = load_dataset(ending[1:], data_files=glob.escape(str(file)), split="train", **options)
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"{key}={file} can't be read: {error.__cause__ or error}") from error
    return _of_table(data, str(file), choose)


def _of_folder(folder: Path, source: Source, split: str, choose: Choose, texts: Sequence[str]) -> list[Placed]:
    """The rows of a folder: what `datasets` saved, a data set with a card, or files, whose names tell their splits."""
    from datasets import DatasetDict, load_from_disk
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    source.refuse("folders", ("revision",))
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        source.refuse("folders that datasets has saved", ("subset",))
        data = load_from_disk(str(folder))
        by_split = dict(data) if isinstance(data, DatasetDict) else {"train": data}
        chosen = _chosen(by_split, source, split, folder)
        return _of_table(by_split[chosen], f"{folder} {chosen}", choose)
    if source.subset:
        return _of_hub(str(folder), source, split, choose)
    try:
        endings = [ending + packed for ending in FORMATS for packed in ("", *PACKED)]
        found = DataFilesDict.from_patterns(
            get_data_patterns(str(folder)), base_path=str(folder), allowed_extensions=endings
        )
    except (EmptyDatasetError, FileNotFoundError):
        found = {}
    files = {str(name): sorted(Path(file) for file in names) for name, names in found.items() if names}
    if not files:
        raise ValueError(f"{source.key('path')}={folder} is a folder without files that end in {', '.join(FORMATS)}")
    chosen = _chosen(files, source, split, folder)
    return [row for file in files[chosen] for row in _of_file(file, source.key("path"), choose, texts)]


def _chosen(by_split: Mapping[str, Any], source: Source, split: str, folder: Path) -> str:
    """The split to read: that asked for, or the only one, as a file is one, unless a setting names another."""
    name = source.split or split
    if name not in by_split and not source.split and len(by_split) == 1:
        return next(iter(by_split))
    if name not in by_split:
        raise ValueError(
            f"{source.key('path')}={folder} has no split {name}; it has {', '.join(by_split)}: set env.split, and "
            "env.eval_split for the held-out rows"
        )
    return name


def _of_hub(name: str, source: Source, split: str, choose: Choose) -> list[Placed]:
    name, _, subset = name.partition(":")
    chosen = source.split or split
    data = _hub_data(name, source, source.subset or subset or None, chosen)
    return _of_table(data, f"{name} {chosen}", choose)


def _hub_data(name: str, source: Source, subset: str | None, split: str) -> Any:
    """A split of a data set of the hub, or of its cache."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from httpx2 import HTTPError  # what huggingface_hub raises

    from grpo_rl.storage.hub import why_no_hub  # it imports huggingface_hub

    told, revision = f"{name}:{subset}" if subset else name, source.revision
    why_no_hub()  # without a network `datasets` looks into its cache at once
    try:
        data = load_dataset(name, subset, split=split, revision=revision)
    except (ConnectionError, DatasetsError, HTTPError) as error:
        raise ValueError(
            f"{told}{f' at revision {revision}' * bool(revision)} can't be had from the hub ({error}); with a copy of "
            "it, set env.path=FILE.jsonl (and env.eval_path for the held-out rows)"
        ) from error
    except ValueError as error:
        # It names the splits and configurations that there are.
        raise ValueError(
            f"{source.key('path')}={told}, split {split}: {error}; {source.key('subset')}, {source.key('split')} choose"
        ) from error
    # Not the commit that the hub's cache has for the branch: offline `datasets` takes the newest copy of its own cache.
    folders = {Path(file["filename"]).parent.name for file in data.cache_files}
    if len(folders) == 1 and _COMMIT.fullmatch(commit := folders.pop()):
        LOADED[name, revision] = commit
    return data


def _of_table(data: Any, where: str, choose: Choose) -> list[Placed]:
    present = tuple(data.column_names)
    rows = data.select_columns(list(choose(present))).to_list()
    return [(f"{where}, row {index}", row, present) for index, row in enumerate(rows)]


def json_rows(file: Path, key: str = "env.path") -> Iterator[tuple[str, dict]]:
    """Each object, with the place where it stands: of a file with one object a line, or with one list of objects.

    Raises:
        ValueError: the file can't be read, or something in it is no object.
    """
    import fsspec  # it comes with `datasets`

    try:
        local, path = fsspec.filesystem("file"), os.path.abspath(file)  # open() takes `::` and `file:` for its own
        with local.open(path, "rt", encoding="utf-8-sig", compression="infer") as opened:
            text = opened.read()
    # Each way of compression has errors of its own.
    except Exception as error:
        raise ValueError(f"{key}={file} can't be read: {error}") from error
    if text.lstrip().startswith("["):
        rows = ((f"{file}, row {index}", row) for index, row in enumerate(_parsed(text, str(file))))
    else:
        # Not splitlines(), which also breaks at characters that a JSON string may hold.
        lines = ((f"{file}, line {number}", line) for number, line in enumerate(text.split("\n"), 1))
        rows = ((where, _parsed(line, where)) for where, line in lines if line.strip())
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no object with columns by their names, but {str(row)[:80]!r}")
        yield where, row


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); give one object a line, or a list of objects") from error


def _whole(value: Any, name: str, where: str) -> Any:
    """The value of a column, all of whose characters are whole: JSON can write halves, which no tokenizer reads."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{where}: {name} has half of a character, {half}, as of an emoji cut in two") from error
    return value
