"""The lock of a run's folder: one process writes there, and whoever comes second is told which.

It is the kernel's, on a file that the writer holds open, so that it ends with the process however that ends. What the
file says is for people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""What ``flock`` fails with on file systems that have no locks."""

_held: set[int] = set()


def _let_go() -> None:
    """Closes the locks that a forked process has from its parent; the parent keeps them."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


# Executed programs don't inherit the descriptor, forked processes do: one that outlives the run would keep the folder.
os.register_at_fork(after_in_child=_let_go)


class FolderInUseError(ValueError):
    """Another process writes in the folder; says which."""


class FolderLock:
    """The right to write into a run's folder, until it is closed or the process ends.

    Raises:
        FolderInUseError: another process has it.
        OSError: the folder can't be written.
    """

    warning: str | None = None
    """What is known where the lock may not hold off every other process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            before = _holder(self._descriptor)
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

    def close(self) -> None:
        """Lets the next one write; the file stays, as removing it could take it from under another's lock."""
        if self._descriptor in _held:  # otherwise this is a forked process, which has let go of it
            _held.remove(self._descriptor)
            self._write({})
            os.close(self._descriptor)


def in_use(folder: Path) -> FolderInUseError | None:
    """Who is writing a run in the folder, without a trace of having asked; None: nobody, as far as locks can tell.

    Raises:
        OSError: its lock can't be read.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        # Other programs name their locks so, too.
        return _refusal(folder, holder) if (holder := _holder(descriptor)) else None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
    return None


def _refusal(folder: Path, holder: dict[str, object]) -> FolderInUseError:
    return FolderInUseError(
        f"{folder} is being written by {_described(holder)}; wait for it, or set another hydra.run.dir"
    )


def _holder(descriptor: int) -> dict[str, object]:
    """What the file says of the process that has the lock, or had it and was killed; empty where it says nothing."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _described(holder: dict[str, object]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
