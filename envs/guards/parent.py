"""Processes that end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has Linux kill this process with the thread that started it, also while it hangs and reads no pipe.

    The parent may have ended before this call: the caller compares ``os.getppid()`` with the parent's id after it.
    Source: prctl(2). Elsewhere nothing is done.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command, as one that runs it in a process which ends with this one, see :func:`end_with_parent`."""
    # The file by itself: the interpreter before the command imports neither site-packages nor this package.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what it starts would too
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() == int(sys.argv[1]):
        os.execvp(sys.argv[2], sys.argv[2:])
