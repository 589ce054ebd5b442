"""Files of a checkpoint: written whole or not at all, each with the SHA-256 of its own contents at its end.

They are archives of torch's, which are ZIP files; the digest is the archive's comment, so that a file is one thing: no
kill leaves it without its digest, and it can be copied anywhere. Anything that reads such archives reads them.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from grpo_rl.storage.whole_file import replacing, sync

LABEL = b"sha256:"
COMMENT_BYTES = len(LABEL) + 64
NO_COMMENT = b"\0\0"
"""A ZIP file ends with its comment, after two bytes with the comment's length; torch writes none."""
PIECE_BYTES = 1 << 20


def write(path: Path, state: Mapping) -> str:
    """Writes a state; readers see the whole file or none. Returns the SHA-256 of the archive.

    Raises:
        OSError: the disk is full or read-only; it names the file. What was there before is untouched.
    """
    with replacing(path, path.with_suffix(".partial")) as partial, open(partial, "wb") as file:
        hashed = _Hashed(file)
        torch.save(dict(state), hashed)
        if hashed.error:
            raise hashed.error
        digest = hashed.sha256.hexdigest()
        file.seek(-len(NO_COMMENT), os.SEEK_END)
        file.write(COMMENT_BYTES.to_bytes(2, "little") + LABEL + digest.encode())
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)
    return digest


class _Hashed:
    """A file whose bytes are hashed on their way to the disk: reading them again would take longer.

    torch makes an error of its own of one in ``write``, without the cause. So the first is kept, and the rest of the
    archive goes nowhere.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256 = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, piece: memoryview) -> int:
        if self.error is None:
            self.sha256.update(piece)
            try:
                self._file.write(piece)
            except OSError as error:
                self.error = error
        return len(piece)

    def flush(self) -> None:
        """Does nothing: the file is flushed when it is complete."""


def check(path: Path) -> str:
    """The SHA-256 that a file carries and has.

    Raises:
        ValueError: it is torn or changed, or no such file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - COMMENT_BYTES - 2))
        end = file.read()
        length, comment = end[-COMMENT_BYTES - 2 : -COMMENT_BYTES], end[-COMMENT_BYTES:]
        if length == COMMENT_BYTES.to_bytes(2, "little") and comment.startswith(LABEL):
            file.seek(0)
            sha256, left = hashlib.sha256(), size - COMMENT_BYTES - len(NO_COMMENT)
            while piece := file.read(min(PIECE_BYTES, left)):
                sha256.update(piece)
                left -= len(piece)
            sha256.update(NO_COMMENT)
            if LABEL + sha256.hexdigest().encode() != comment:
                raise ValueError("its contents are not those that were written (another SHA-256)")
            return sha256.hexdigest()
    raise ValueError("it does not end as one, so it is torn or another file")


def read(path: Path) -> Any:
    """A file's contents, its tensors on the disk until they are used. Tensors, numbers and text only: no code runs.

    Raises:
        ValueError: the file can't be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # torch raises RuntimeError, UnpicklingError, EOFError or KeyError, depending on where the file is broken.
        raise ValueError(str(error) or f"torch.load can't read it ({type(error).__name__})") from error
