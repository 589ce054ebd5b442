"""Processes that end with the process that started them."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
END_S = 1.0
"""Seconds that a group has to end in order after SIGTERM."""
ALONE, WITH_GROUP = "alone", "with-group"


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Has Linux send this process a signal when the thread that started it ends, also while it hangs and reads no pipe.

    The parent may have ended before this call: the caller compares ``os.getppid()`` with the parent's id after it.
    Source: prctl(2). Elsewhere nothing is done.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def ending_with_parent(command: Sequence[str], with_group: bool = False) -> list[str]:
    """The command, as one that runs it in a process which ends with this one, see :func:`end_with_parent`.

    With ``with_group`` it leads a group of its own, all of which ends with the command, and with this process.
    """
    how = WITH_GROUP if with_group else ALONE
    # The file by itself: the interpreter before the command imports neither site-packages nor this package.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), how, *command]


def _end_with_group(parent: int) -> None:
    """Returns in a new process; this one waits for its end, or a moment after SIGTERM, and then kills the group."""
    assert os.getpgrp() == os.getpid(), "it would kill the group of others"

    def pass_on(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, END_S)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit()
    if child := os.fork():
        os.waitpid(child, 0)
        os.killpg(0, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    _, parent, how, *command = sys.argv
    if how == WITH_GROUP:
        _end_with_group(int(parent))
    else:
        end_with_parent()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what it starts would too
        signal.signal(number, signal.SIG_DFL)
    if how == WITH_GROUP or os.getppid() == int(parent):
        os.execvp(command[0], command)
