"""FleetEngine: a fleet as one engine, for the thread that trains: it responds to prompts and takes weights.

The fleet itself lives in another thread, on an event loop: sampling for training, engines that die and join.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from typing import Any, Protocol, SupportsInt, TypeVar

import torch
from torch import Tensor

from grpo_rl.cluster.fleet import Fleet
from grpo_rl.engines.base import (
    AsyncEngine,
    EngineDeadError,
    EngineLostError,
    Samples,
    Sampling,
    StepByGenerate,
    check_request,
)
from grpo_rl.engines.loop_thread import LoopThread
from grpo_rl.weights.remote import EngineControl, RemoteTransport
from grpo_rl.weights.transport import Held

T = TypeVar("T")


class FleetMember(AsyncEngine, EngineControl, Protocol):
    """An engine that is called from an event loop and, during a push, from a thread."""


class FleetEngine(StepByGenerate):
    """A started fleet, as collectors, `grpo_rl.weights.push.WeightSync`, evaluation and diagnosis take it.

    An engine that dies while weights are on their way does not hold up the others. The one that takes its place is
    given weights by :attr:`on_new_engine` as soon as the thread that trains waits for responses: nothing changes the
    weights then.

    Args:
        fleet: a fleet of engines of one kind, started on ``loop``.
        loop: the thread whose event loop runs the fleet.
        transport: makes what brings weights to the engines it is given.
    """

    def __init__(
        self,
        fleet: Fleet[FleetMember],
        loop: LoopThread,
        transport: Callable[[Sequence[FleetMember]], RemoteTransport],
    ) -> None:
        super().__init__()
        self.fleet, self.loop = fleet, loop
        engines = loop.run(fleet.present())
        self._transport = transport(engines)
        self._transport.on_lost = self._on_lost
        self.dtype, self.takes_adapters = self._transport.dtype, self._transport.takes_adapters
        self.max_model_len = min(engine.max_model_len for engine in engines)
        self.version = 0
        self.on_new_engine: Callable[[], None] | None = None
        """Gives weights to engines that have none; set by the WeightSync that pushes into this."""
        self._numbers = itertools.count()

    # As a transport.

    def fingerprint(self, name: str, tensor: Tensor) -> SupportsInt:
        """See :meth:`grpo_rl.weights.transport.Transport.fingerprint`."""
        return self._transport.fingerprint(name, tensor)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """See :meth:`grpo_rl.weights.transport.Transport.send`."""
        held = self._transport.send(weights, version)
        self.version = version
        return held

    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """See :meth:`grpo_rl.weights.transport.Transport.held`."""
        return self._transport.held(shapes)

    @contextmanager
    def paused(self, only_new: bool = False) -> Iterator[bool]:
        """See :meth:`grpo_rl.weights.transport.Transport.paused`."""
        self._transport.engines = list(self.loop.run(self.fleet.present()))
        with self._transport.paused(only_new) as anyone_new:
            yield anyone_new
        self.loop.run(self.fleet.admit(self._transport.engines))

    def _on_lost(self, engine: Any, error: EngineDeadError) -> None:
        self.loop.run(self.fleet.lose(engine, error))

    # As a fleet.

    @property
    def replaced(self) -> int:
        """See :class:`grpo_rl.engines.base.EngineFleet`."""
        return self.fleet.restarts

    @replaced.setter
    def replaced(self, count: int) -> None:
        self.fleet.restarts = count

    def events(self) -> list[str]:
        """See :meth:`grpo_rl.engines.base.EngineFleet.events`."""
        events, self.fleet.events = self.fleet.events, []
        return events

    async def call(self, work: Callable[[AsyncEngine], Awaitable[T]], responses: int) -> T:
        """See :meth:`grpo_rl.engines.base.EngineFleet.call`."""
        return await self.fleet.call(work, responses)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """See :meth:`grpo_rl.engines.base.EngineFleet.run`."""
        return self.loop.run(work)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """See :meth:`grpo_rl.engines.base.EngineFleet.wait`."""
        result = self.loop.start(work)
        try:
            while not result.done():
                joined = self.loop.start(self.fleet.new_engine())
                wait({result, joined}, return_when=FIRST_COMPLETED)
                if not joined.done():
                    joined.cancel()
                elif not result.done():
                    joined.result()
                    assert self.on_new_engine, "engines joined, and no WeightSync has been made for them"
                    self.on_new_engine()
            return result.result()
        finally:
            result.cancel()

    # As a sampler.

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        """See :meth:`grpo_rl.engines.base.Sampler.generate`."""
        check_request(prompts, n, sampling, self.max_model_len)

        async def all_samples() -> list[Samples]:
            return list(await asyncio.gather(*(self._samples(prompt, n, sampling) for prompt in prompts)))

        return self.wait(all_samples())

    async def _samples(self, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        """``n`` responses to a prompt, asked for again where an engine dies.

        Raises:
            EngineDeadError: engines died too often.
        """
        while True:
            with contextlib.suppress(EngineLostError):
                return await self.fleet.call(
                    lambda engine: engine.generate(f"batch-{next(self._numbers)}", prompt, n, sampling), n
                )

    def sleep(self) -> None:
        """Does nothing: engines have devices of their own."""

    def wake(self) -> None:
        """Does nothing: the engines never sleep."""

    def close(self) -> None:
        """Ends all engines, and the loop."""
        self.loop.run(self.fleet.close())
        self._transport.close()
        self.loop.close()
