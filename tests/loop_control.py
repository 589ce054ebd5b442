"""LoopControl: an engine of this process, as a trainer calls engines of others."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from grpo_rl.engines.base import AsyncEngine
from grpo_rl.weights.remote import EngineControl


class LoopControl(EngineControl):
    """An engine on an event loop that runs in another thread."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self.name, self.dtype = engine.name, engine.dtype
        self.takes_adapters, self.proves_bytes = engine.takes_adapters, engine.proves_bytes

    @override
    def submit(self, method: str, *args: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(self._engine, method)(*args), self._loop)
