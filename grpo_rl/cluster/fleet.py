"""Fleet: several engines behind one interface; groups are routed by load, and dead engines are replaced.

It lives in a thread of its own, on an event loop. :class:`FleetEngine` is the fleet as one engine, for the thread that
trains: it responds to prompts and takes weights.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, SupportsInt, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from grpo_rl.engines.base import EngineDeadError, Sampler, Samples, Sampling, check_request
from grpo_rl.engines.loop_thread import AsyncEngine, EngineLostError, EngineStartError, LoopThread
from grpo_rl.waits import waiting
from grpo_rl.weights.push import Held, Transport
from grpo_rl.weights.remote import EngineControl, RemoteTransport

RETRY_S = 30.0
"""Seconds until an engine for which the cluster had no resources is started again."""

FIRST_RETRY_S = 2.0
"""Seconds until an engine that died while it started is started again; they double with each try."""

STEP_S = 0.05
"""Seconds that one step waits for a response."""

E = TypeVar("E", bound=AsyncEngine)
R = TypeVar("R")


@dataclass(eq=False)
class _EngineSlot(Generic[E]):
    """A slot for an engine, whose load is counted in responses; a new engine has no weights yet."""

    number: int
    engine: E | None = None
    new_engine: E | None = None
    load: int = 0
    launches: int = 0
    launching: bool = False


class Fleet(Generic[E]):
    """Engines that hold one policy; each call goes to the one with the least to do.

    All responses of a group come from one engine, which computes their prompt once. Continuous batching keeps long
    responses from holding up short ones within an engine. An engine is not ready before it has weights: whoever gives
    it some, as :class:`FleetEngine` does, calls :meth:`admit`.

    Args:
        launch: starts the engine of a slot.
        max_restarts: how often the engine of one slot is replaced before the run ends.
    """

    def __init__(self, launch: Callable[[int], Awaitable[E]], size: int, max_restarts: int = 3) -> None:
        self._launch, self._max_restarts = launch, max_restarts
        self._slots = [_EngineSlot[E](number) for number in range(size)]
        self._starts: list[asyncio.Task[None]] = []  # in order: a simulated run has to replay
        self._lost: EngineDeadError | None = None
        self._change = asyncio.Event()
        self.restarts = 0
        """Engines that were or are to be replaced, so far."""
        self.events: list[str] = []
        """Messages about engines that were lost or replaced; reading them removes them."""

    async def start(self) -> None:
        """Launches all engines; the error of the first launch that failed is raised."""
        starts = [asyncio.create_task(self._fill(slot)) for slot in self._slots]
        self._starts += starts
        await asyncio.gather(*starts)

    async def _fill(self, slot: _EngineSlot[E]) -> None:
        """Launches an engine; one that dies while it starts is replaced like any other, as often in all."""
        slot.launching, pause_s = True, FIRST_RETRY_S
        try:
            while slot.new_engine is None:
                try:
                    slot.new_engine = await self._launch(slot.number)
                except EngineStartError as error:
                    if slot.launches >= self._max_restarts:
                        raise
                    self.restarts += 1
                    self.events.append(f"{_in_short(error)}. It is replaced")
                    await asyncio.sleep(pause_s)
                    pause_s = min(RETRY_S, 2 * pause_s)
                slot.launches += 1
        finally:
            slot.launching = False
        self._change.set()

    async def call(self, work: Callable[[E], Awaitable[R]], responses: int = 1) -> R:
        """Runs ``work`` on the ready engine that has the least to do, and returns its result.

        Args:
            responses: number of responses that ``work`` samples, which count as the engine's load meanwhile.

        Raises:
            EngineLostError: the engine died; a new call goes to another, or to the one that replaces it.
            EngineDeadError: engines died too often.
        """
        slot = await self._least_loaded()
        engine = slot.engine
        assert engine is not None
        slot.load += responses
        try:
            return await work(engine)
        except EngineDeadError as error:
            self._replace(slot, engine, error)
            raise EngineLostError(str(error)) from error
        finally:
            slot.load -= responses

    async def _least_loaded(self) -> _EngineSlot[E]:
        if not (ready := self._ready()):
            with waiting("an engine that is ready"):
                while not (ready := self._ready()):
                    await self._changed()
        if self._lost:
            raise self._lost
        return min(ready, key=lambda slot: (slot.load, slot.number))

    def _ready(self) -> list[_EngineSlot[E]]:
        return [slot for slot in self._slots if slot.engine is not None]

    async def _changed(self) -> None:
        """Returns when an engine has joined, died or got weights."""
        if not self._lost:
            self._change.clear()
            await self._change.wait()
        if self._lost:
            raise self._lost

    def _replace(self, slot: _EngineSlot[E], engine: E, error: EngineDeadError) -> None:
        """Replaces the engine, once, however many calls found it dead."""
        if engine not in (slot.engine, slot.new_engine):
            return
        slot.engine = slot.new_engine = None
        if slot.launches > self._max_restarts:
            self._lost = EngineDeadError(
                f"{error}; slot {slot.number} has lost {slot.launches} (inference_model.max_restarts="
                f"{self._max_restarts})"
            )
            self._change.set()
            return
        self.restarts += 1
        slot.launching = True
        self.events.append(f"{error}. It is replaced, and its unfinished groups are sampled again")
        task = asyncio.create_task(self._relaunch(slot, engine))
        self._starts.append(task)
        task.add_done_callback(self._starts.remove)

    async def _relaunch(self, slot: _EngineSlot[E], dead: E) -> None:
        """Starts an engine in the slot of a dead one; while there is no room for it, the others go on without."""
        with contextlib.suppress(Exception):  # it is dead: its errors no longer matter
            await dead.close()
        while True:
            try:
                return await self._fill(slot)
            except Exception as error:
                why = f"engine {slot.number} can't be started again: {error}"
                if not any(
                    other.engine or other.new_engine or other.launching for other in self._slots if other is not slot
                ):
                    self._lost = EngineDeadError(why)
                    self._change.set()
                    return
                self.events.append(f"{why}. The others go on without it; it is tried again")
                await asyncio.sleep(RETRY_S)

    async def new_engine(self) -> None:
        """Returns when an engine has joined that has no weights yet; EngineDeadError: engines died too often."""
        while not any(slot.new_engine for slot in self._slots):
            await self._changed()

    async def present(self) -> list[E]:
        """The live engines, those without weights included; EngineDeadError: engines died too often."""
        if self._lost:
            raise self._lost
        return [engine for slot in self._slots if (engine := slot.new_engine or slot.engine) is not None]

    async def admit(self, engines: Collection[E]) -> None:
        """Marks these engines as ready: they have weights now."""
        for slot in self._slots:
            if slot.new_engine in engines:
                slot.engine, slot.new_engine = slot.new_engine, None
                if slot.launches > 1:
                    self.events.append(f"engine {slot.number} is back")
        self._change.set()

    async def lose(self, engine: E, error: EngineDeadError) -> None:
        """Replaces an engine that was found dead; EngineDeadError: engines died too often."""
        for slot in self._slots:
            self._replace(slot, engine, error)
        if self._lost:
            raise self._lost

    async def close(self) -> None:
        """Ends every engine, and every launch."""
        for task in list(self._starts):
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        engines = [engine for slot in self._slots if (engine := slot.engine or slot.new_engine) is not None]
        await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)


def _in_short(error: Exception) -> str:
    """The error's first line, and its last one, where a traceback names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(dict.fromkeys(line.rstrip(".:") for line in (lines[0], lines[-1]))) if lines else repr(error)


class FleetMember(AsyncEngine, EngineControl, Protocol):
    """An engine that is called from an event loop and, during a push, from a thread."""


class FleetEngine(Transport, Sampler):
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

    def events(self) -> list[str]:
        """Messages about engines that were lost or replaced since the last call."""
        events, self.fleet.events = self.fleet.events, []
        return events

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of work that samples, on the fleet's loop: new engines are given weights in the meantime."""
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
