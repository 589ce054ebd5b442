"""FleetEngine: a fleet as one engine, for the thread that trains: it responds to prompts and takes weights.

The fleet itself lives in another thread, on an event loop: sampling for training, engines that die and join.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, Protocol, SupportsInt, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from grpo_rl.cluster.fleet import Fleet
from grpo_rl.engines.base import (
    AsyncEngine,
    EngineDeadError,
    EngineFleet,
    EngineLostError,
    Sampler,
    Samples,
    Sampling,
    check_request,
)
from grpo_rl.engines.loop_thread import LoopThread
from grpo_rl.weights.remote import EngineControl, RemoteTransport
from grpo_rl.weights.transport import Held, Transport

T = TypeVar("T")
STEP_S = 0.05
"""Seconds that one step waits for a response."""


class FleetMember(AsyncEngine, EngineControl, Protocol):
    """An engine that is called from an event loop and, during a push, from a thread."""


class FleetEngine(Transport, EngineFleet, Sampler):
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
        self._submitted: dict[Future[Samples], int] = {}

    # As a transport.

    @override
    def fingerprint(self, name: str, tensor: Tensor) -> SupportsInt:
        return self._transport.fingerprint(name, tensor)

    @override
    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        held = self._transport.send(weights, version)
        self.version = version
        return held

    @override
    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        return self._transport.held(shapes)

    @override
    @contextmanager
    def paused(self, only_new: bool = False) -> Iterator[bool]:
        self._transport.engines = list(self.loop.run(self.fleet.present()))
        with self._transport.paused(only_new) as anyone_new:
            yield anyone_new
        self.loop.run(self.fleet.admit(self._transport.engines))

    def _on_lost(self, engine: Any, error: EngineDeadError) -> None:
        self.loop.run(self.fleet.lose(engine, error))

    # As a fleet.

    @property
    def replaced(self) -> int:
        """Engines that were or are to be replaced, so far."""
        return self.fleet.restarts

    @replaced.setter
    def replaced(self, count: int) -> None:
        self.fleet.restarts = count

    @override
    def events(self) -> list[str]:
        events, self.fleet.events = self.fleet.events, []
        return events

    @override
    async def call(self, work: Callable[[AsyncEngine], Awaitable[T]], responses: int) -> T:
        return await self.fleet.call(work, responses)

    @override
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    @override
    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        result = self.loop.start(work)
        try:
            while not result.done():
                self._wait({result})
            return result.result()
        finally:
            result.cancel()

    def _wait(self, results: Collection[Future[Any]], timeout_s: float | None = None) -> None:
        """Waits for one of the results, or until an engine has joined, which is given weights."""
        joined = self.loop.start(self.fleet.new_engine())
        wait({*results, joined}, timeout_s, FIRST_COMPLETED)
        if not joined.done():
            joined.cancel()
        elif not any(result.done() for result in results):
            joined.result()
            assert self.on_new_engine, "engines joined, and no WeightSync has been made for them"
            self.on_new_engine()

    # As a sampler.

    @override
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        check_request(prompts, n, sampling, self.max_model_len)

        async def all_samples() -> list[Samples]:
            return list(await asyncio.gather(*(self._samples(prompt, n, sampling) for prompt in prompts)))

        return self.wait(all_samples())

    async def _samples(self, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        """``n`` responses to a prompt, asked for again where an engine dies."""
        while True:
            with contextlib.suppress(EngineLostError):
                return await self.fleet.call(
                    lambda engine: engine.generate(f"batch-{next(self._numbers)}", prompt, n, sampling), n
                )

    @override
    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        check_request([prompt], 1, sampling, self.max_model_len)
        self._submitted[self.loop.start(self._samples(prompt, 1, sampling))] = request

    @override
    def step(self) -> list[tuple[int, Samples]]:
        if self._submitted:
            self._wait(self._submitted, STEP_S)
        finished = [response for response in self._submitted if response.done()]
        return [(self._submitted.pop(response), response.result()) for response in finished]

    @override
    def abort(self) -> None:
        for response in self._submitted:
            response.cancel()
        self._submitted.clear()

    @override
    def sleep(self) -> None:
        pass  # engines have devices of their own

    @override
    def wake(self) -> None:
        pass

    def close(self) -> None:
        """Ends all engines, and the loop."""
        self.loop.run(self.fleet.close())
        self._transport.close()
        self.loop.close()
