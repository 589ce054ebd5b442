"""Child: a process with a deadline, which is killed with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any


class Child:
    """A process that leads a group of its own: Ctrl-C spares it, and a kill takes its children too.

    Args:
        command: and ``options``, as `subprocess.Popen` has them.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._lock, self._killed = threading.Lock(), False
        self.process = subprocess.Popen(command, start_new_session=True, **options)

    def ends(self, until: float) -> bool:
        """True if the process ends before ``until``, by the monotonic clock."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> int:
        """Kills the group, and returns the exit code of the process; any thread may call it, and again."""
        with self._lock:
            if not self._killed:  # a second time, the group's number may be another's
                kill_group(self.process.pid)
            self._killed = True
        return self.process.wait()


def kill_group(leader: int) -> None:
    """Kills a process that leads a group of its own, with all that it has started there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def ending(code: int) -> str:
    """The end of a process in words.

    >>> ending(-9), ending(3)
    ('SIGKILL', 'exit code 3')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
