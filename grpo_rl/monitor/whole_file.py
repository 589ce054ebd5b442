"""Files that readers see whole or not at all, and errors of a disk that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """The block, whose ``OSError`` names the file: one that comes from a write or from Arrow names none by itself."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; what was written there takes the place of ``path`` when the block ends.

    A process that is killed in the block leaves ``.<name>.tmp``, which readers of a folder skip; a block that fails
    leaves nothing.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path):
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes the whole of a file, safe on the disk before its name shows it."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
