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
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from grpo_rl.storage.whole_file import replacing
from grpo_rl.waits.record import ended, head, read_record, record_path, shown_duration
from grpo_rl.waits.registry import OTHER_RANKS, PROCESS, Wait, Waits
from grpo_rl.waits.table import OWN_THREADS, role_of, stacks, table, words

POLL_S = 0.5
TOLD_LATE_S = 1.0
"""Seconds beyond its deadline after which a wait is told: whoever waits may deal with a deadline by itself."""
WITH_RANKS_S = 0.5
"""A rank that has waited for the others for so many seconds writes a record, so that they see that it waits."""
RANKS_S = 1.5
"""Seconds in which the ranks that have just begun to wait, or are late as well, have written their records."""
QUIET_S = 60.0
"""A wait of the same name is told again after so many seconds, and not before it has lasted twice as long."""
REMEDY = "if it goes on, end the run (Ctrl-C twice, or SIGTERM) and resume it"
_DISK_S = 1.5
"""Longest time that the watcher spends on one file or one line: a disk may hang, and a terminal may be held."""
_HANDLED = b"\xff"
_SETTLE_S = 0.05

X = TypeVar("X")


class Watcher:
    """Tells of late waits, in one line each and by the table in the run's folder; see :func:`watching`."""

    def __init__(self, waits: Waits, poll_s: float = POLL_S) -> None:
        self._waits, self._poll_s = waits, poll_s
        self.say: Callable[[str], None] = _to_stderr
        """Gets each warning; standard error, until there is a run with logs."""
        self.folder: Path | None = None
        self.rank, self.size = 0, 1
        self._quiet: dict[tuple[str, str], float] = {}
        self._passed = ""
        """The last record of a passed deadline."""
        self._written = ""
        """The last record that was written."""
        self._with_ranks: Wait | None = None
        """The last wait for the other ranks that is in this rank's record."""
        self._stays = False
        """True once a record of this folder had a late wait, or was asked for: it stays when the run has ended."""
        self._looking, self._writing = threading.Lock(), threading.Lock()
        self._wake, self._asks = os.pipe()
        for end in (self._wake, self._asks):
            os.set_blocking(end, False)
        self._handles, self._ends, self._unhandled = False, threading.Event(), False
        self._before: Any = signal.SIG_DFL
        """The handler of SIGUSR1 before this one; None: it is not Python's."""
        self._thread = threading.Thread(target=self._run, name=OWN_THREADS, daemon=True)

    @property
    def role(self) -> str:
        """The role of the main thread."""
        return "trainer" if self.size == 1 else f"rank {self.rank}"

    @contextmanager
    def telling(self, folder: Path, rank: int = 0, size: int = 1) -> Iterator[None]:
        """Writes records into the run's folder until the context ends; ranks write one each.

        One with a late wait, or that was asked for, stays in the end, and does not ask for SIGUSR1 any more: the
        process may go on with another run, or with none.
        """
        self.folder, self.rank, self.size, self._stays = folder, rank, size, False
        self._write([])
        try:
            yield
        finally:
            self._look()
            self.folder, self.rank, self.size = None, 0, 1  # the watcher's thread writes no more
            last = ended(self._written, os.getpid(), socket.gethostname())
            found = _bounded(_DISK_S, read_record, None, record_path(folder, rank))
            is_own = found and (found.pid, found.host) == (os.getpid(), socket.gethostname())  # or the folder was moved
            if is_own and not self._stays:
                with suppress(OSError):
                    _bounded(_DISK_S, record_path(folder, rank).unlink, None, True)
            elif is_own and last != self._written:
                self._put(record_path(folder, rank), lambda: last)
            self._written = ""

    @contextmanager
    def saying(self, say: Callable[[str], None]) -> Iterator[None]:
        """Has warnings said by this function until the context ends, the last of them then."""
        self.say = say
        try:
            yield
        finally:
            self._look()
            with self._alone():  # the watcher's thread may be saying one
                self.say = _to_stderr

    def _head(self, overdue: list[Wait]) -> str:
        """The head of a record, with the table of all open waits and those that ended late."""
        waits = self._shown(overdue)
        at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        names = list(dict.fromkeys(words(wait) for wait in overdue))
        with_ranks = any(wait.what == OTHER_RANKS for wait in waits)
        # A handler of before may do something that nobody who asks for a table means, such as ending the run.
        renews = self._handles and not callable(self._before)
        first = head(os.getpid(), socket.gethostname(), self.role, at, renews, names, with_ranks)
        return f"{first}\n\n{table(waits, self.role)}"

    def _record(self, overdue: list[Wait]) -> str:
        """The text of a record: its head and the stacks, and below those the last record of a deadline that had passed.

        The record of a wait that goes on is worth more than a later one, in which nothing shows any more why it did.
        """
        record = f"{self._head(overdue)}\n\nStacks\n\n{stacks(self._shown(overdue), self.role)}\n"
        if any(wait.ended_s is None for wait in overdue):
            self._passed = record
            return record
        return f"{record}\nA deadline had passed before\n\n{self._passed}" if self._passed else record

    def _shown(self, overdue: list[Wait]) -> list[Wait]:
        return list(dict.fromkeys([*list(self._waits.open), *overdue]))

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._ends.is_set():
            asked = bool(poll.poll(self._poll_s * 1000)) and self._is_asked()
            try:
                if asked and not self._ends.is_set():
                    self._answer()
            except Exception as error:  # who looks on must not end a run, nor stop looking on
                _to_stderr(f"Warning. The table of waits can't be shown ({type(error).__name__}: {error})")
            self._look()

    def _is_asked(self) -> bool:
        """Tells whether SIGUSR1 has come: by its number when it comes, and by its handler in the main thread.

        The first fails where another library has taken the place of Python's wakeup descriptor, the second while the
        main thread is in a call that never returns to Python. Where both come they count once.
        """
        self._ends.wait(_SETTLE_S)
        heard = os.read(self._wake, 1024)
        if signal.SIGUSR1 in heard:
            self._unhandled = _HANDLED not in heard
            return True
        is_new, self._unhandled = _HANDLED in heard and not self._unhandled, self._unhandled and _HANDLED not in heard
        return is_new

    def _answer(self) -> None:
        """Shows the table on standard error, and writes the record."""
        overdue, self._stays = self._overdue(), True
        shown = self._head(overdue)
        if path := self._write(overdue):
            _bounded(_DISK_S, _to_stderr, None, f"{shown}\n\nStacks are in {path}")
        else:
            _bounded(_DISK_S, lambda: _to_stderr(self._record(overdue)), None)

    def _overdue(self) -> list[Wait]:
        return [wait for wait in list(self._waits.open) if wait.age_s() >= wait.limit_s + TOLD_LATE_S]

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """A context in which no other thread looks; False where one does, and does not come to an end."""
        alone = self._looking.acquire(timeout=_DISK_S)
        try:
            yield alone
        finally:
            if alone:
                self._looking.release()

    def _look(self) -> None:
        """Tells of each late wait that is not told yet."""
        try:
            with self._alone() as alone:
                if alone:
                    self._tell_late()
        except Exception as error:  # as above
            _to_stderr(f"Warning. Waits can't be told ({type(error).__name__}: {error})")

    def _tell_late(self) -> None:
        overdue = self._overdue()
        late = [*overdue, *(self._waits.late.popleft() for _ in range(len(self._waits.late)))]
        now, told = self._waits.clock(), list[Wait]()
        for wait in late:
            key = (role_of(wait, self.role), wait.what)
            if now >= self._quiet.get(key, now):
                self._quiet[key] = now + max(QUIET_S, wait.age_s())
                told.append(wait)
        if told:
            path = self._write(late)
            for wait in told:
                self._tell(wait, path)
        elif self.size > 1:
            long = [wait for wait in self._shown([]) if wait.what == OTHER_RANKS and wait.age_s() >= WITH_RANKS_S]
            if long and long[-1] is not self._with_ranks:
                self._with_ranks = long[-1]
                self._write(overdue)

    def _tell(self, wait: Wait, path: Path | None) -> None:
        missing = _bounded(RANKS_S + 0.5, self._silent_ranks, "", wait)
        if missing is None:
            return  # a rank before this one tells
        where = f" Who waits for whom: {path}" if path else f"\n{table(list(self._waits.open), self.role)}"
        age, limit = shown_duration(wait.age_s()), shown_duration(wait.limit_s)
        ended = " before it ended" if wait.ended_s is not None else ""
        remedy = wait.remedy or ("" if ended else REMEDY)
        _bounded(
            _DISK_S,
            self.say,
            None,
            f"Warning. {role_of(wait, self.role)} has waited {age} for {words(wait)}{ended}, longer than {limit}"
            f"{': ' if missing or remedy else ''}{missing}{remedy}.{where}",
        )

    def _silent_ranks(self, wait: Wait) -> str | None:
        """Words on the ranks that do not wait as this one does; None where a rank below this one tells."""
        if self.size == 1 or wait.what != OTHER_RANKS or self.folder is None:
            return ""
        self._ends.wait(RANKS_S)
        began, silent = time.time() - wait.age_s(), []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            path = record_path(self.folder, rank)
            record = read_record(path)
            is_of_now = record is not None and path.stat().st_mtime > began
            if (
                record
                and is_of_now
                and rank < self.rank
                and any(name.startswith(OTHER_RANKS) for name in record.overdue)
            ):
                return None
            if not (record and is_of_now and record.with_ranks):
                process = f" (process {record.pid} on {record.host})" if record else ""
                silent.append(f"rank {rank}{process}")
        does = "does" if len(silent) == 1 else "do"
        return f"{', '.join(silent)} {does} not wait for the others; " if silent else ""

    def _write(self, overdue: list[Wait]) -> Path | None:
        """Writes the record and returns its path; None where there is no folder, or its disk hangs."""
        if self.folder is None:
            return None
        self._stays |= bool(overdue)
        return self._put(record_path(self.folder, self.rank), lambda: self._record(overdue))

    def _put(self, path: Path, record: Callable[[], str]) -> Path | None:
        """Writes a record, in a thread: the disk, from which stacks are read too, may hang."""

        def write() -> Path | None:
            if not self._writing.acquire(blocking=False):  # the last one hangs
                return None
            try:
                text = record()
                with replacing(path) as temporary:
                    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
                self._written = text
                return path
            except Exception as error:  # who looks on must not end a run
                _to_stderr(f"Warning. {path} can't be written ({type(error).__name__}: {error})")
                return None
            finally:
                self._writing.release()

        return _bounded(_DISK_S, write, None)

    def __enter__(self) -> Watcher:
        try:
            self._before = signal.signal(signal.SIGUSR1, self._on_signal)
            self._handles = True
            # Also heard while the main thread is in a call that never returns to Python.
            other = signal.set_wakeup_fd(self._asks, warn_on_full_buffer=False)
            if other != -1:  # another library's, which must go on working
                signal.set_wakeup_fd(other)
        except ValueError:  # not the main thread, which alone may do this
            pass
        self._thread.start()
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._ask()
        if callable(self._before):
            self._before(number, frame)

    def _ask(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._asks, _HANDLED)

    def __exit__(self, *_: object) -> None:
        if self._handles:
            # By default it would end the process, which may be sent one late.
            ends = self._before in (signal.SIG_DFL, None)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN if ends else self._before)
            if (ours := signal.set_wakeup_fd(-1)) not in (self._asks, -1):
                signal.set_wakeup_fd(ours)
        self._ends.set()
        self._ask()
        self._thread.join(_DISK_S)
        if not self._thread.is_alive():  # otherwise it may still use them
            os.close(self._wake)
            os.close(self._asks)


_watcher: Watcher | None = None


@contextmanager
def watching(deadline_s: float, waits: Waits = PROCESS, poll_s: float = POLL_S) -> Iterator[Watcher]:
    """The watcher of this process, at work while the outermost such context lasts; its deadline holds.

    A handler that SIGUSR1 had before is called too, and is its handler again afterwards; where there was none the
    signal is ignored then. One by `faulthandler.register` is replaced.

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


def _bounded(seconds: float, function: Callable[..., X], otherwise: X, *arguments: object) -> X:
    """The function's result or error; ``otherwise`` where it takes longer, and is left behind."""
    result: Future[X] = Future()

    def call() -> None:
        try:
            result.set_result(function(*arguments))
        except Exception as error:  # raised below
            result.set_exception(error)

    thread = threading.Thread(target=call, daemon=True, name=OWN_THREADS)
    thread.start()
    thread.join(seconds)
    return result.result() if result.done() else otherwise


def _to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # closed
        print(text, file=sys.stderr, flush=True)
