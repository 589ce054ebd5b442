"""Waits: each wait of this process has a name and a deadline, and one that passes it is logged.

The :class:`Watcher` is the thread that logs them; SIGUSR1 prints the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from grpo_rl.storage.whole_file import replacing

FILE = "waits.txt"
"""All waits of the run's process and its stacks when a wait was late last, in the run's folder."""
STACKS = "\n\nStacks\n\n"
POLL_S = 0.5
GRACE_S = 1.0
"""Seconds beyond its deadline after which a wait is logged: the caller may handle the deadline itself."""
QUIET_S = 60.0
"""A wait of the same name is logged again after so many seconds, and not before it has lasted twice as long."""
REMEDY = "if it goes on, end the run (Ctrl-C twice, or SIGTERM) and resume it"


class Waits:
    """The waits that are open now; they age by ``clock``, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.open: dict[Wait, None] = {}
        """Open waits, the oldest first. Threads add and remove their own without a lock: each is one operation."""
        self.default_s = math.inf
        """The deadline of a wait that has none of its own."""


PROCESS = Waits()


@dataclass(eq=False)
class Wait:
    """A context that names a wait while it lasts; it costs about 1 µs, and never ends a wait by itself.

    Args:
        what: thing that is waited for, worded to follow "waits for"; waits of one thread and name are logged together.
        detail: further words for the reader, such as a row or a step.
        deadline_s: seconds after which it is logged; None: those of ``logger.wait_deadline_s``; ``math.inf``: never.
        version: the policy version that is waited with.
        remedy: what a reader of the warning can do.

    >>> waits = Waits()
    >>> with waiting("responses of engine 0", "group 7", deadline_s=60, version=3, waits=waits):
    ...     [(str(wait), wait.limit_s) for wait in waits.open]
    [('responses of engine 0 (group 7, version 3)', 60)]
    >>> waits.open
    {}
    """

    what: str
    detail: str = ""
    deadline_s: float | None = None
    version: int | None = None
    remedy: str = ""
    waits: Waits = PROCESS

    def __enter__(self) -> Wait:
        self.thread, self.since = threading.get_ident(), self.waits.clock()
        self.waits.open[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        self.waits.open.pop(self, None)  # it may have been ended: an interrupt may have a run unwind twice

    def again(self) -> None:
        """Starts the deadline anew: what is waited for has given a sign of life."""
        self.since = self.waits.clock()

    def age_s(self) -> float:
        """Seconds since the wait began, or since its last sign of life."""
        return self.waits.clock() - self.since

    @property
    def limit_s(self) -> float:
        """The deadline in seconds: its own, or that of all waits without one."""
        return self.waits.default_s if self.deadline_s is None else self.deadline_s

    def __str__(self) -> str:
        version = "" if self.version is None else f"version {self.version}"
        details = ", ".join(filter(None, (self.detail, version)))
        return f"{self.what} ({details})" if details else self.what


waiting = Wait


class Watcher:
    """Logs late waits, in one line each and by the table in the run's folder; see :func:`watching`."""

    def __init__(self, waits: Waits, poll_s: float = POLL_S) -> None:
        self._waits, self._poll_s = waits, poll_s
        self.say: Callable[[str], None] = _to_stderr
        """Gets each warning; standard error, until there is a run with logs."""
        self._path: Path | None = None
        self._role = "trainer"
        self._quiet: dict[tuple[str, str], float] = {}
        self._looking, self._ends = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    @contextmanager
    def telling(self, folder: Path, rank: int = 0, size: int = 1) -> Iterator[None]:
        """Has late waits written into the run's folder until the context ends, by each rank into a file of its own."""
        self._path = folder / (FILE if rank == 0 else f"waits.rank{rank}.txt")
        self._role = "trainer" if size == 1 else f"rank {rank}"
        self._path.unlink(missing_ok=True)  # of the start before
        try:
            yield
        finally:
            self._path, self._role = None, "trainer"

    @contextmanager
    def saying(self, say: Callable[[str], None]) -> Iterator[None]:
        """Has this function show warnings until the context ends."""
        self.say = say
        try:
            yield
        finally:
            taken = self._looking.acquire(timeout=1.0)  # the watcher's thread may be printing one
            self.say = _to_stderr
            if taken:
                self._looking.release()

    def _run(self) -> None:
        while not self._ends.wait(self._poll_s):
            try:
                with self._looking:
                    self._look()
            except Exception as error:  # the watcher must neither end a run nor stop watching
                _to_stderr(f"Warning. Waits can't be logged ({type(error).__name__}: {error})")

    def _look(self) -> None:
        """Logs each late wait that is not logged yet."""
        now, new = self._waits.clock(), list[Wait]()
        for wait in list(self._waits.open):
            key = (role_of(wait, self._role), wait.what)
            if wait.age_s() >= wait.limit_s + GRACE_S and now >= self._quiet.get(key, now):
                self._quiet[key] = now + max(QUIET_S, wait.age_s())
                new.append(wait)
        path, waits = self._path, table(list(self._waits.open), self._role)
        for wait in new:  # before the file is written: its disk may be what hangs
            self.say(
                f"Warning. {role_of(wait, self._role)} has waited {shown_duration(wait.age_s())} for {wait}, longer "
                f"than {shown_duration(wait.limit_s)}: {wait.remedy or REMEDY}.{f' All waits: {path}' if path else ''}"
            )
        if new and path:
            at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            head = f"Process {os.getpid()} on {socket.gethostname()}, {self._role}, at {at}\n\n"
            with replacing(path) as temporary, open(temporary, "w", errors="backslashreplace") as file:
                file.write(f"{head}{waits}{STACKS}")
                file.flush()
                faulthandler.dump_traceback(file)

    def __enter__(self) -> Watcher:
        with suppress(ValueError, OSError, AttributeError, RuntimeError):  # standard error is no file
            # A handler of the user's own is called as well. It stays when the run ends, so that a late signal is
            # harmless: to ignore it instead would be inherited by the programs that this process starts.
            is_handled = callable(signal.getsignal(signal.SIGUSR1))
            faulthandler.register(signal.SIGUSR1, sys.__stderr__, chain=is_handled)  # pyrefly: ignore[bad-argument-type]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(1.0)


_watcher: Watcher | None = None


@contextmanager
def watching(deadline_s: float, waits: Waits = PROCESS, poll_s: float = POLL_S) -> Iterator[Watcher]:
    """The watcher of this process, at work while the outermost such context lasts.

    A wait without a deadline of its own is logged after its ``deadline_s``.
    """
    global _watcher
    if _watcher is not None:
        yield _watcher
        return
    waits.default_s = deadline_s
    try:
        with Watcher(waits, poll_s) as _watcher:
            yield _watcher
    finally:
        _watcher, waits.default_s = None, math.inf


def role_of(wait: Wait, main_role: str) -> str:
    """The role of the thread that waits: the main thread has the process's, another thread its own name."""
    if wait.thread == threading.main_thread().ident:
        return main_role
    return next((thread.name for thread in threading.enumerate() if thread.ident == wait.thread), "a thread that ended")


def table(waits: Sequence[Wait], role: str) -> str:
    """The waits, the longest first; those of one thread and name are one row. ``role`` is that of the main thread."""
    rows: dict[tuple[str, str], list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since):
        rows.setdefault((role_of(wait, role), wait.what), []).append(wait)
    cells = [("role", "waits for", "since", "deadline")]
    for (who, _), same in rows.items():
        more = f", and {len(same) - 1} more" if len(same) > 1 else ""
        late = " passed" if same[0].age_s() >= same[0].limit_s else ""
        cells.append(
            (who, f"{same[0]}{more}", shown_duration(same[0].age_s()), f"{shown_duration(same[0].limit_s)}{late}")
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def shown_duration(seconds: float) -> str:
    """A duration for people.

    >>> [shown_duration(s) for s in (0.3, 42, 600, 9000, 198_000, float("inf"))]
    ['0.3 s', '42 s', '10 min', '2.5 h', '55 h', '']
    """
    if seconds == float("inf"):
        return ""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # closed
        print(text, file=sys.stderr, flush=True)


@contextmanager
def start_phase(
    what: str, say: Callable[[str], None] = print, show: bool | None = None, live: bool = False
) -> Iterator[None]:
    """Prints a phase's name at its start, and its seconds at its end; no more where it fails.

    Two lines in a file. In a terminal the second is written over the first, unless something was printed between.

    Args:
        say: shows the line of its end.
        show: whether this process shows the lines; None: it does unless torchrun gave it a rank above zero.
        live: whether a live view shows already what goes on.

    >>> with start_phase("loading the model"):
    ...     pass
    loading the model …
    loading the model … 0.0 s
    """
    show = os.environ.get("RANK", "0") == "0" if show is None else show
    start = time.perf_counter()
    if show and not live:
        print(f"{what} …", end="\r" if sys.stdout.isatty() else "\n", flush=True)
    with waiting(what):
        yield
    if show:
        say(f"{what} … {time.perf_counter() - start:.1f} s")
