"""The lock of a run's folder: one process writes there; a second process gets an error that names the holder.

The lock is the kernel's, on a file that the writer holds open, so the kernel releases it however the process ends. The
file's content is for error messages.
"""

import errno
import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of ``flock`` on file systems without locks."""
ATTEMPTS, PAUSE_S = 4, 0.05

_held: set[int] = set()


def _close_inherited() -> None:
    """Closes the locks that a forked process inherited; the parent keeps them."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


# Executed programs don't inherit the descriptor, forked processes do: one that outlives the run would keep the folder.
os.register_at_fork(after_in_child=_close_inherited)


class FolderInUseError(ValueError):
    """The folder is in use by another process, which the message names."""


class FolderLock:
    """The right to write into a run's folder, until it is closed or the process ends.

    Raises:
        FolderInUseError: another process holds the lock.
        OSError: the folder can't be written.
    """

    warning: str | None = None
    """Warning if the lock may be ineffective."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = (folder / LOCK).absolute()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            before = _holder(self._descriptor)
            try:
                _lock(self._descriptor)
            except BlockingIOError:
                raise _refusal(folder, before) from None
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                self.warning = f"{folder} has no locks ({error.strerror}): no other process may write there"
            if before and before.get("host") != socket.gethostname():
                last = f"{folder} was last written by {_described(before)}, and not left in order"
                self.warning = f"{last}; make sure that it has ended: some file systems do not lock between hosts"
            since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
            self._write({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        except BaseException:
            os.close(self._descriptor)
            raise
        _held.add(self._descriptor)

    def _write(self, holder: dict[str, object]) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode() if holder else b"", 0)

    def is_lost(self) -> bool:
        """True if the folder was moved or removed since: another process may write at its place."""
        try:
            return not os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError:
            return True

    def close(self) -> None:
        """Releases the lock; the file stays, since another process may have locked it already."""
        if self._descriptor in _held:  # otherwise this is a forked process, which has closed it
            _held.remove(self._descriptor)
            self._write({})
            os.close(self._descriptor)


def in_use(folder: Path) -> FolderInUseError | None:
    """The error that names the process using the folder, found without taking the lock; None: not in use."""
    held, holder = holder_of(folder)
    # Other programs use this file name, too.
    return _refusal(folder, holder) if held and holder else None


def holder_of(folder: Path) -> tuple[bool, dict[str, object]]:
    """True if a process holds the lock, and the record of the process that does, or was killed with it.

    The record is empty where the last one ended in order. On a file system without locks none is held.

    Raises:
        OSError: the lock can't be read.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False, {}
    held = False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            held = True
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        return held, _holder(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Takes the lock; :func:`holder_of` of another process holds it for a moment, which blocks no other process."""
    for _ in range(ATTEMPTS - 1):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _refusal(folder: Path, holder: dict[str, object]) -> FolderInUseError:
    return FolderInUseError(f"{folder} is in use by {_described(holder)}; wait for it, or set another hydra.run.dir")


def _holder(descriptor: int) -> dict[str, object]:
    """The record in the file of the process that holds the lock, or was killed with it; empty if nothing."""
    return json_object(os.pread(descriptor, 4096, 0))


def json_object(text: bytes) -> dict[str, Any]:
    """The JSON object in a text; empty where the text is anything else, such as a torn file or another program's."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _described(holder: dict[str, object]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
