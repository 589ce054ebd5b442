"""Files and folders that readers see whole or not at all, and errors of a disk that name the file."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes every ``OSError`` of the block name the file: one of a write or of Arrow's names none by itself."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """A path to write to; what was written there takes the place of ``path`` when the block ends.

    A process that is killed in the block leaves ``temporary``; a block that fails leaves nothing.

    Args:
        temporary: next to ``path``; None: ``.<name>.tmp``, which readers of a folder skip.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    with naming(path):
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes the whole of a file, safe on the disk before its name shows it; returns when the name is safe, too."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of ``folder`` when the block ends, once it is safe on the disk.

    A process that is killed leaves ``<name>.partial`` or ``<name>.old``, which the next one removes; a block that fails
    leaves nothing. Killed between the two renames, it leaves no ``folder``: :func:`put_back` has the earlier one there.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _take_place(partial, folder)


def _take_place(partial: Path, folder: Path) -> None:
    for path in (*partial.rglob("*"), partial):
        sync(path)
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Puts the earlier folder in its place again where a process was killed before the new one took it.

    Everything else that a killed process left next to it is removed.
    """
    old = folder.with_name(f"{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (old, folder.with_name(f"{folder.name}.partial")):
        shutil.rmtree(left, ignore_errors=True)


def remove_left(folder: Path) -> None:
    """Removes what killed writes of a folder's files left; who writes there has ended."""
    for left in folder.glob(".*.tmp"):
        if (folder / left.name[1 : -len(".tmp")]).exists():  # another program's file stays
            left.unlink()


def make_folder(path: Path) -> None:
    """Makes a folder that outlasts a power cut, unless it is there."""
    if not path.exists():
        path.mkdir(parents=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Returns when a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
