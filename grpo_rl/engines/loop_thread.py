"""LoopThread: where engines that are called from an event loop, and what calls them, are run."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from grpo_rl.waits.registry import waiting

T = TypeVar("T")
END_S = 5.0
"""Seconds that what is cancelled has to end, such as programs that it has started."""


class LoopThread:
    """An event loop in a thread of its own, to which other threads hand coroutines.

    >>> loop = LoopThread()
    >>> loop.run(asyncio.sleep(0, result=3)); loop.close()
    3
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sampling", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts the coroutine; the future gets what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine and returns its result; its errors are raised here."""
        # Whatever the coroutine waits for has a name and a deadline of its own.
        with waiting("the thread that runs the engines", coroutine.__qualname__, math.inf):
            return self.start(coroutine).result()

    def close(self) -> None:
        """Ends the thread; what it still runs is cancelled first, and awaited for a moment."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_S)
