"""Ctrl-C: the first ends the run after this step, with a checkpoint; the second ends it now."""

from __future__ import annotations

import signal
from collections.abc import Callable


class Interrupt:
    """Records whether the user asked the run to stop; a context manager, which restores the old handler.

    Outside the main thread no handler is installed: the main thread's owner handles Ctrl-C.
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
