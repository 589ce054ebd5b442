"""Ctrl-C: once ends the run after this step, with a checkpoint; twice ends it now."""

from __future__ import annotations

import signal
from collections.abc import Callable


class Interrupt:
    """Whether the user asked the run to stop; used as a context manager, which puts the old handler back.

    Outside the main thread nothing is handled: whoever owns that thread handles Ctrl-C.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.asked = False

    def _on_interrupt(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("Finishing this step, then a checkpoint. Ctrl-C again stops now.")

    def __enter__(self) -> Interrupt:
        try:
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        except ValueError:
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
