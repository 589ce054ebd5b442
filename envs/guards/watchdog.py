"""Watch: names a scorer that freezes this process, and ends the process, where no thread of it could.

A call into C that never lets go of Python's interpreter, as a regular expression that backtracks, stops all threads: no
deadline fires, and Ctrl-C is not heard. So a second process looks on. Both share a page of memory: to watch a call
writes its deadline there, which costs microseconds. When a deadline passes and nobody takes it back, the second process
tells what froze, on stderr and in the run's folder, and ends the first with SIGALRM (exit code 142 in a shell), which
writes the stacks of all threads, the scorer's with it. Whoever restarts runs can go on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

POLL_S = 0.25
CONFIRM_S = 1.5
"""Seconds for which a deadline must have passed: a process that was stopped and goes on takes it back at once."""
TOLD_WITHIN_S = CONFIRM_S + 2 * POLL_S
"""Seconds after a watch's end within which it is reported."""
FILE = "frozen_scorer.txt"
"""The file in the run's folder that names what froze."""
_STACK_S = 3.0  # in which the signal must have ended the process
_HEADER = struct.Struct("dQI")  # when the watch ends, which it is, bytes of its message
_MESSAGE, _FOLDER, _SIZE = 64, 4096, 8192  # where they begin in the page, and its end
_NEVER = 0.0


class Watch:
    """Watches one call after the other, of one thread; any thread may :meth:`close` it.

    >>> watch = Watch()
    >>> watch.begin(60.0, "row 7")
    True
    >>> watch.end()
    >>> watch.close()
    """

    def __init__(self) -> None:
        self._dog = _watchdog()
        self._key = next(_keys)
        self._closed = False

    def begin(self, seconds: float, message: str) -> bool:
        """Gives a call so many seconds from now on; ``message`` says which it is. False where the watch is closed."""
        with self._dog.lock:
            if not self._closed:
                self._dog.watched[self._key] = (time.monotonic() + seconds, message)
                self._dog.write()
            return not self._closed

    def end(self) -> None:
        """Ends the watch: the call has ended."""
        with self._dog.lock:
            if self._dog.watched.pop(self._key, None):
                self._dog.write()

    def close(self) -> None:
        """Watches no more calls."""
        with self._dog.lock:
            self._closed = True
        self.end()


def tell_in(folder: Path) -> None:
    """Reports what froze in this folder too."""
    dog, name = _watchdog(), os.fsencode(folder.resolve())
    if len(name) < _SIZE - _FOLDER:
        with dog.lock:
            dog.page[_FOLDER:_SIZE] = name.ljust(_SIZE - _FOLDER, b"\0")


class _Watchdog:
    """The process that looks on, and the page that is shared with it."""

    def __init__(self) -> None:
        self.process_id, self.lock = os.getpid(), threading.Lock()
        self.watched: dict[int, tuple[float, str]] = {}
        self._writes = itertools.count(1)
        with tempfile.TemporaryFile() as shared:
            shared.truncate(_SIZE)
            self.page = mmap.mmap(shared.fileno(), _SIZE)
            self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process is
            # The default action, which follows, ends the process.
            faulthandler.register(signal.SIGALRM, self._stacks, all_threads=True, chain=True)
            theirs, self._alive = os.pipe()  # it ends where this process does
            handles = [theirs, shared.fileno(), self._stacks.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, handles)],
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            os.close(theirs)

    def write(self) -> None:
        """Puts the watch that ends first into the page."""
        until, message = min(self.watched.values()) if self.watched else (_NEVER, "")
        text = message.encode(errors="replace")[: _FOLDER - _MESSAGE]
        self.page[_MESSAGE : _MESSAGE + len(text)] = text
        _HEADER.pack_into(self.page, 0, until, next(self._writes), len(text))


_keys = itertools.count()
_dog: _Watchdog | None = None
_start = threading.Lock()


def _watchdog() -> _Watchdog:
    """The watchdog of this process; a fork has none until it asks for one."""
    global _dog
    with _start:
        if _dog is None or _dog.process_id != os.getpid():
            _dog = _Watchdog()
        return _dog


# ---- in the process that looks on ----


def look_on(process_id: int, alive: int, shared: int, stacks: int) -> None:
    """Waits until a watch passes its end, tells of it and ends the process; or until that has ended by itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a terminal or a job
        signal.signal(number, signal.SIG_IGN)
    page = mmap.mmap(shared, _SIZE)
    suspect, since = 0, 0.0
    while os.getppid() == process_id and not select.select([alive], [], [], POLL_S)[0]:
        now = time.monotonic()
        until, write, length = _HEADER.unpack_from(page)
        if until == _NEVER or now < until or _is_stopped(process_id):
            suspect = 0
        elif write != suspect:
            suspect, since = write, now
        elif now - since >= CONFIRM_S:
            _tell(page, page[_MESSAGE : _MESSAGE + length])
            _end(process_id, alive)
            with open(stacks, "rb") as file:
                file.seek(0)
                _tell(page, file.read())
            return


def _tell(page: mmap.mmap, text: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text + b"\n")
    folder = page[_FOLDER:_SIZE].rstrip(b"\0")
    with contextlib.suppress(OSError):
        if folder:
            with open(os.path.join(os.fsdecode(folder), FILE), "ab") as file:
                file.write(text + b"\n")


def _end(process_id: int, alive: int) -> None:
    for number in (signal.SIGALRM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)
        if os.getppid() != process_id or select.select([alive], [], [], _STACK_S)[0]:
            return


def _is_stopped(process_id: int) -> bool:
    """Tells whether Ctrl-Z or a debugger holds it; only Linux tells."""
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False


if __name__ == "__main__":
    look_on(*map(int, sys.argv[1:]))
