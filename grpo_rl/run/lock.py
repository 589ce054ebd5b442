"""The lock of a run's folder: one process writes there; a second process gets an error that names the holder.

The lock is the kernel's, on a file that the writer holds open, so the kernel releases it however the process ends. The
file's content is for people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of ``flock`` on file systems without locks."""
CLOCK_S = 60.0
"""Seconds by which the clock may have been set since a process began."""

_held: set[int] = set()


def _let_go() -> None:
    """Closes the locks that a forked process inherited; the parent keeps them."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


# Executed programs don't inherit the descriptor, forked processes do: one that outlives the run would keep the folder.
os.register_at_fork(after_in_child=_let_go)


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
            before = _holder(os.pread(self._descriptor, 4096, 0))
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _refusal(folder, before) from None
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                self.warning = (
                    f"the file system of {folder} has no locks ({error.strerror}): see to it that no other process "
                    "writes there"
                )
            if before and before.get("host") != socket.gethostname():
                # Some mounts of NFS keep locks to the host.
                self.warning = (
                    f"{folder} was last written by {_described(before)}, and was not left in order; where its file "
                    "system does not lock between hosts, see to it that this process has ended"
                )
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
        if self._descriptor in _held:  # otherwise this is a forked process, which has let go of it
            _held.remove(self._descriptor)
            self._write({})
            os.close(self._descriptor)


def in_use(folder: Path) -> FolderInUseError | None:
    """The error that names the process using the folder; None: not in use, as far as this host can see.

    Raises:
        OSError: its lock can't be read.
    """
    holder = holder_of(folder)
    return _refusal(folder, holder) if is_alive(holder) else None


def holder_of(folder: Path) -> dict[str, object]:
    """The record of the process that holds the lock, or was killed with it; empty where the last one ended in order.

    Raises:
        OSError: the lock can't be read.
    """
    try:
        return _holder((folder / LOCK).read_bytes())
    except FileNotFoundError:
        return {}


def is_alive(holder: Mapping[str, Any]) -> bool | None:
    """True if the process of a record is there; None where it is another host's. A process of its number that began
    after the record was written is another one."""
    if holder and holder.get("host") != socket.gethostname():
        return None
    try:
        since, process = datetime.fromisoformat(holder["since"]), psutil.Process(holder["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < since.timestamp() + CLOCK_S
    except (psutil.Error, LookupError, ValueError, TypeError, OverflowError):
        return False


def _refusal(folder: Path, holder: dict[str, object]) -> FolderInUseError:
    return FolderInUseError(f"{folder} is in use by {_described(holder)}; wait for it, or set another hydra.run.dir")


def _holder(content: bytes) -> dict[str, object]:
    """The record in a lock's file, which another program may have written; empty if there is none."""
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _described(holder: dict[str, object]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
