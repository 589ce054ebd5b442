"""The waits of this process: what each waits for, since when, and how long it may take."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


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
