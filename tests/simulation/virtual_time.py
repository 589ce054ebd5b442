"""An asyncio event loop whose clock jumps to the next thing that happens: hours of waiting take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LockedUpError(RuntimeError):
    """An error: everything waits for something that nothing will do."""


class _Jumping(selectors.DefaultSelector):
    """A selector in which time passes at once where a loop would wait for a timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise LockedUpError(f"at {self.now:g} s nothing is scheduled, and the program is not over")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual seconds, for coroutines of one thread without input or output."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def _write_to_self(self) -> None:
        """Does nothing: no other thread waits to be woken."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, run in virtual time.

    Raises:
        LockedUpError: it waits for something that will never happen.

    >>> async def patient():
    ...     await asyncio.sleep(86400)
    ...     return asyncio.get_running_loop().time()
    >>> round(run(patient()))
    86400
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
