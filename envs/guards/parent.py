"""Processes that end with the process that started them."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has Linux kill this process with the thread that started it, also while it hangs and reads no pipe.

    The parent may have ended before this call: the caller compares ``os.getppid()`` with the parent's id after it.
    Source: prctl(2). Elsewhere nothing is done.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
