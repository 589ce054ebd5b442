"""The waits of this process: what each waits for, since when, and how long it may take."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType


class Waits:
    """The waits that are open now.

    Args:
        clock: seconds, by which waits age.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.open: dict[Wait, None] = {}
        """Open waits, the oldest first. Threads add and remove their own without a lock: each is one operation."""
        self.late: deque[Wait] = deque(maxlen=100)
        """Waits that ended beyond their deadline, as most errors of deadlines do, until the watcher has told them."""
        self.default_s = math.inf
        """The deadline of a wait that has none of its own."""


OTHER_RANKS = "the other ranks"
"""The name of each wait of a rank for others: the watcher finds out which of them do not wait."""
PROCESS = Waits()
"""The waits of this process."""


class Wait:
    """One wait, open inside its ``with`` block; see :func:`waiting`."""

    __slots__ = (
        "_task", "_waits", "asked_by", "deadline_s", "detail", "ended_s", "line", "remedy", "since", "thread",
        "version", "what",
    )  # fmt: skip

    def __init__(
        self, waits: Waits, what: str, detail: str, deadline_s: float | None, version: int | None, remedy: str
    ) -> None:
        self._waits, self.what, self.detail, self.remedy = waits, what, detail, remedy
        self.deadline_s, self.version = deadline_s, version
        self.ended_s: float | None = None

    def __enter__(self) -> Wait:
        return self.begin(sys._getframe(1))

    def begin(self, frame: FrameType | None) -> Wait:
        """Opens the wait, which the frame asks for; None: the table shows where its thread is. ``__exit__`` ends it."""
        self.asked_by: CodeType | None = frame and frame.f_code
        self.line, self.thread = frame.f_lineno if frame else 0, threading.get_ident()
        loop = asyncio._get_running_loop()
        task = asyncio.current_task(loop) if loop else None
        self._task = weakref.ref(task) if task else None
        self.since = self._waits.clock()
        self._waits.open[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        if self not in self._waits.open:  # it has been ended: an interrupt may have a run unwind twice
            return
        self._waits.open.pop(self, None)
        self._task = None  # it goes on without this wait
        if self.age_s() >= self.limit_s:
            self.ended_s = self._waits.clock()
            self._waits.late.append(self)

    def again(self) -> None:
        """Starts the deadline anew: what is waited for has given a sign of life."""
        self.since = self._waits.clock()

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The task that waits; None where a thread does. It is not kept: one that is abandoned ends, with its wait."""
        return self._task() if self._task else None

    def age_s(self) -> float:
        """Seconds from the wait's begin, or its last sign of life, to now or to its end."""
        return (self._waits.clock() if self.ended_s is None else self.ended_s) - self.since

    @property
    def limit_s(self) -> float:
        """The deadline in seconds: its own, or that of all waits without one."""
        return self._waits.default_s if self.deadline_s is None else self.deadline_s


def waiting(
    what: str,
    detail: str = "",
    deadline_s: float | None = None,
    version: int | None = None,
    remedy: str = "",
    waits: Waits = PROCESS,
) -> Wait:
    """A context that names a wait while it lasts; it costs about 2 µs, and never ends a wait by itself.

    Args:
        what: thing that is waited for, worded to follow "waits for"; waits of one thread and name are told together.
        detail: further words for the reader, such as a row or a step.
        deadline_s: seconds after which it is told; None: those of ``logger.wait_deadline_s``; ``math.inf``: it is
            shown in the table alone.
        version: the policy version that is waited with.
        remedy: what a reader of the warning can do.

    >>> waits = Waits()
    >>> with waiting("responses of engine 0", "group 7", deadline_s=60, waits=waits):
    ...     [(wait.what, wait.limit_s) for wait in waits.open]
    [('responses of engine 0', 60)]
    >>> waits.open
    {}
    """
    return Wait(waits, what, detail, deadline_s, version, remedy)
