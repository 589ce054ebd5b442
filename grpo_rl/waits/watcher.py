"""Watcher: a thread that tells of waits beyond their deadline, and answers SIGUSR1 with the table of all waits."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from grpo_rl.storage.whole_file import replacing
from grpo_rl.waits.record import head, read_record, record_path, shown_duration
from grpo_rl.waits.registry import OTHER_RANKS, PROCESS, Wait, Waits
from grpo_rl.waits.table import role_of, stacks, table, words

POLL_S = 0.5
TOLD_LATE_S = 1.0
"""Seconds beyond its deadline after which a wait is told: whoever waits may deal with a deadline by itself."""
RANKS_S = 1.5
"""Seconds in which the other ranks, whose deadlines pass at about the same time, have written their records."""
QUIET_S = 60.0
"""A wait of the same name is told again after so many seconds, and not before it has lasted twice as long."""
REMEDY = "if it goes on, end the run (Ctrl-C twice, or SIGTERM) and resume it"
_WRITE_S = 2.0


class Watcher:
    """Tells of late waits, in one line each and by the table in the run's folder; see :func:`watching`.

    What is told goes to standard error until there is a run.
    """

    def __init__(self, waits: Waits, poll_s: float = POLL_S) -> None:
        self._waits, self._poll_s = waits, poll_s
        self.say: Callable[[str], None] = _to_stderr
        """Gets each warning."""
        self.folder: Path | None = None
        self.rank, self.size = 0, 1
        self._quiet: dict[tuple[str, str], float] = {}
        self._answered = -1.0
        self._looking, self._writing = threading.Lock(), threading.Lock()
        self._wake, self._asks = os.pipe()
        for end in (self._wake, self._asks):
            os.set_blocking(end, False)
        self._renews, self._ends = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    @property
    def role(self) -> str:
        """The role of the main thread."""
        return "trainer" if self.size == 1 else f"rank {self.rank}"

    @contextmanager
    def telling(self, folder: Path, rank: int = 0, size: int = 1) -> Iterator[None]:
        """Writes records into the run's folder until the context ends; ranks write one each."""
        self.folder, self.rank, self.size = folder, rank, size
        self._write(self._record([]))
        try:
            yield
        finally:
            self._look()
            self.folder, self.rank, self.size, self.say = None, 0, 1, _to_stderr

    def _record(self, overdue: list[Wait]) -> str:
        """The text of a record: head, table of all open waits and those that ended late, stacks."""
        waits = list(dict.fromkeys([*list(self._waits.open), *overdue]))
        at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        names = list(dict.fromkeys(words(wait) for wait in overdue))
        first = head(os.getpid(), socket.gethostname(), self.role, at, self._renews, names)
        return f"{first}\n\n{table(waits, self.role)}\n\nStacks\n\n{stacks(waits, self.role)}\n"

    def _run(self) -> None:
        while not self._ends.is_set():
            if select.select([self._wake], [], [], self._poll_s)[0]:
                with suppress(BlockingIOError):
                    os.read(self._wake, 1024)
                self._answer()
            try:
                self._look()
            except Exception as error:  # who looks on must not end a run, nor stop looking on
                _to_stderr(f"Warning. Waits can't be told ({type(error).__name__}: {error})")

    def _answer(self) -> None:
        """Answers SIGUSR1, which may come twice: once for the process and once its main thread is free."""
        if self._ends.is_set() or time.monotonic() - self._answered < 1.0:
            return
        text = self._record(self._overdue())
        path = self._write(text)
        said = f"{text.partition(chr(10) * 2 + 'Stacks')[0]}\n\nStacks are in {path}" if path else text
        in_thread(_to_stderr, said)
        self._answered = time.monotonic()

    def _overdue(self) -> list[Wait]:
        return [wait for wait in list(self._waits.open) if wait.age_s() >= wait.limit_s + TOLD_LATE_S]

    def _look(self) -> None:
        """Tells of each late wait that is not told yet."""
        with self._looking:
            ended = [self._waits.late.popleft() for _ in range(len(self._waits.late))]
            if late := [*self._overdue(), *ended]:
                self._tell_all(late)

    def _tell_all(self, late: list[Wait]) -> None:
        now, told = self._waits.clock(), list[Wait]()
        for wait in late:
            key = (role_of(wait, self.role), wait.what)
            if now >= self._quiet.get(key, now):
                self._quiet[key] = now + max(QUIET_S, wait.age_s())
                told.append(wait)
        if told:
            path = self._write(self._record(late))  # of all that are late: other ranks read what this one waits for
            for wait in told:
                self._tell(wait, path)

    def _tell(self, wait: Wait, path: Path | None) -> None:
        missing = self._silent_ranks(wait)
        if missing is None:
            return  # a rank before this one tells
        where = f" Who waits for whom: {path}" if path else f"\n{table(list(self._waits.open), self.role)}"
        age, limit = shown_duration(wait.age_s()), shown_duration(wait.limit_s)
        self.say(
            f"Warning. {role_of(wait, self.role)} has waited {age} for {words(wait)}, longer than {limit}: "
            f"{missing}{wait.remedy or REMEDY}.{where}"
        )

    def _silent_ranks(self, wait: Wait) -> str | None:
        """Words on the ranks that do not wait as this one does; None where a rank below this one will tell."""
        if self.size == 1 or not wait.what.startswith(OTHER_RANKS) or self.folder is None:
            return ""
        self._ends.wait(RANKS_S)
        began, silent = time.time() - wait.age_s(), []
        for rank in range(self.size):
            path = record_path(self.folder, rank)
            record = read_record(path)
            waits = (
                record and path.stat().st_mtime > began and any(name.startswith(OTHER_RANKS) for name in record.overdue)
            )
            if waits and rank < self.rank:
                return None
            if not waits:
                process = f" (process {record.pid} on {record.host})" if record else ""
                silent.append(f"rank {rank}{process}")
        return f"{', '.join(silent)} {'does' if len(silent) == 1 else 'do'} not wait for the others; " if silent else ""

    def _write(self, text: str) -> Path | None:
        """Writes the record and returns its path; None without a folder. A disk that hangs holds up no warning."""
        if self.folder is None:
            return None
        path = record_path(self.folder, self.rank)

        def write() -> None:
            if not self._writing.acquire(blocking=False):  # it hangs
                return
            try:
                with replacing(path) as temporary:
                    temporary.write_text(text)
            except OSError as error:
                _to_stderr(f"Warning. {path} can't be written ({error.strerror}):\n{text}")
            finally:
                self._writing.release()

        in_thread(write).join(_WRITE_S)
        return path

    def __enter__(self) -> Watcher:
        try:
            self._before = signal.signal(signal.SIGUSR1, self._on_signal)
            self._renews = True
            # Also heard while the main thread is in a call that never returns to Python.
            other = signal.set_wakeup_fd(self._asks, warn_on_full_buffer=False)
            if other != -1:  # another library's, which must go on working
                signal.set_wakeup_fd(other)
        except ValueError:  # not the main thread, which alone may do this
            pass
        self._thread.start()
        return self

    def _on_signal(self, *_: object) -> None:
        with suppress(BlockingIOError):
            os.write(self._asks, b".")

    def __exit__(self, *_: object) -> None:
        if self._renews:
            signal.signal(signal.SIGUSR1, self._before)
            if (ours := signal.set_wakeup_fd(-1)) not in (self._asks, -1):
                signal.set_wakeup_fd(ours)
        self._ends.set()
        self._on_signal()
        self._thread.join(_WRITE_S)
        if not self._thread.is_alive():  # otherwise it may still use them
            os.close(self._wake)
            os.close(self._asks)


_watcher: Watcher | None = None


@contextmanager
def watching(deadline_s: float, waits: Waits = PROCESS, poll_s: float = POLL_S) -> Iterator[Watcher]:
    """The watcher of this process, at work while the outermost such context lasts; its deadline holds.

    Args:
        deadline_s: seconds after which a wait without a deadline of its own is told.
    """
    global _watcher
    if _watcher is not None:
        yield _watcher
        return
    waits.default_s = deadline_s
    waits.late.clear()  # of what was not watched
    try:
        with Watcher(waits, poll_s) as _watcher:
            yield _watcher
    finally:
        _watcher, waits.default_s = None, math.inf


def in_thread(function: Callable[..., object], *arguments: object) -> threading.Thread:
    """Calls the function in a thread that does not keep the process from ending."""
    thread = threading.Thread(target=function, args=arguments, daemon=True, name="waits")
    thread.start()
    return thread


def _to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # closed
        print(text, file=sys.stderr, flush=True)
