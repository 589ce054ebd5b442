"""LoopControl: an engine of this process, as a trainer calls engines of others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from grpo_rl.engines.base import AsyncEngine
from grpo_rl.engines.loop_thread import LoopThread
from grpo_rl.weights.remote import EngineControl


class LoopControl(EngineControl):
    def __init__(self, engine: AsyncEngine, loop: LoopThread) -> None:
        self._engine, self._loop = engine, loop
        self.name, self.dtype = engine.name, engine.dtype
        self.takes_adapters, self.proves_bytes = engine.takes_adapters, engine.proves_bytes

    @override
    def submit(self, method: str, *args: Any) -> Future[Any]:
        return self._loop.start(getattr(self._engine, method)(*args))


@contextmanager
def served(engine: AsyncEngine) -> Iterator[LoopControl]:
    """The engine on an event loop in a thread, as a trainer has it; closed at the end."""
    loop = LoopThread()
    control = LoopControl(engine, loop)
    try:
        yield control
    finally:
        control.submit("close").result(60)
        loop.close()
