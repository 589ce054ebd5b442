"""Phases of a run's start: what goes on, and the seconds that it took."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_rl.waits import waiting


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
