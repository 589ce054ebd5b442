"""Engines that are called from an event loop: their interface, the thread of it, and an engine that another steps."""

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from grpo_rl.engines.base import EngineDeadError, Sampler, Samples, Sampling, reason
from grpo_rl.waits import waiting

T = TypeVar("T")
END_S = 5.0
"""Seconds that what is cancelled has to end, such as programs that it has started."""
_Call = tuple[Sequence[int], Sampling, asyncio.Future[Samples]]
IDLE_S = 0.02
"""Seconds that one wait for calls takes while the engine has nothing to do."""


class EngineStartError(EngineDeadError):
    """An engine's process has ended before it was ready; with its name and the reason."""


class EngineLostError(RuntimeError):
    """An engine died while it sampled a group, whose responses are lost; another engine can sample it again."""


class AsyncEngine(Protocol):
    """An engine in a process of its own, called from one event loop; requests under way survive weight updates.

    Every call but :meth:`generate` has a deadline, and a death is noticed in each; both raise EngineDeadError.
    """

    name: str
    """The engine's name in messages; the others are as in `grpo_rl.engines.base.Engine`."""
    version: int
    dtype: torch.dtype
    max_model_len: int
    takes_adapters: bool
    proves_bytes: bool

    async def generate(self, request_id: str, prompt: Sequence[int], n: int, sampling: Sampling) -> Samples:
        """``n`` responses to a prompt; tokens from before and after an update carry their own versions.

        Raises:
            ValueError: as `grpo_rl.engines.base.Sampler.generate`.
            RuntimeError: vLLM aborted it.
            EngineDeadError: the engine died, or hangs.
        """

    async def check_health(self) -> None:
        """Returns once the engine has responded to a call."""

    async def close(self) -> None:
        """Ends the process, within the deadline; may be called on a dead engine, and twice."""


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


class SteppedEngine:
    """Samples for calls from an event loop while the thread that owns the engine is in :meth:`run`.

    Calls are taken in between two steps of the engine, so one with continuous batching samples all of them together.
    With ``goes_on`` a call at which the engine fails is refused; otherwise it ends :meth:`run`.
    """

    def __init__(self, engine: Sampler, goes_on: bool = False) -> None:
        self._engine, self._goes_on = engine, goes_on
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._open: dict[int, _Call] = {}
        self._next = 0

    async def sample(self, prompt: Sequence[int], sampling: Sampling) -> Samples:
        """One response to a prompt."""
        response: asyncio.Future[Samples] = asyncio.get_running_loop().create_future()
        self._calls.put((prompt, sampling, response))
        return await response

    def run(self, work: Future[T]) -> T:
        """Steps the engine until the work, which samples, is done; its result."""
        try:
            while not work.done():
                self._take(wait=not self._open)
                if self._open:
                    self._step()
            return work.result()
        finally:
            work.cancel()
            self._engine.abort()
            left = [*self._open.values()]
            with contextlib.suppress(queue.Empty):
                while True:
                    left.append(self._calls.get_nowait())
            for *_, response in left:  # of sessions that have ended: their clients must not wait for ever
                with contextlib.suppress(RuntimeError):  # the loop is closed, and the call with it
                    response.get_loop().call_soon_threadsafe(response.cancel)
            self._open.clear()

    def _step(self) -> None:
        try:
            finished = self._engine.step()
        except Exception as error:
            if not self._goes_on or isinstance(error, EngineDeadError):
                raise
            self._engine.abort()
            while self._open:  # each by itself, so that it fails alone
                prompt, sampling, response = self._open.pop(next(iter(self._open)))
                try:
                    (outcome,) = self._engine.generate([prompt], 1, sampling)
                except EngineDeadError:
                    raise
                except Exception as error:
                    outcome = ValueError(f"the engine fails at this request: {reason(error)}")
                self._give(response, outcome)
        else:
            for request, samples in finished:
                self._give(self._open.pop(request)[-1], samples)

    def _take(self, wait: bool) -> None:
        """Gives the engine the calls that have come; waits a moment for one where it has nothing to do."""
        with contextlib.suppress(queue.Empty):
            if wait:
                with waiting("calls of agents", deadline_s=float("inf")):
                    self._submit(*self._calls.get(timeout=IDLE_S))
            while True:
                self._submit(*self._calls.get_nowait())

    def _submit(self, prompt: Sequence[int], sampling: Sampling, response: asyncio.Future[Samples]) -> None:
        if response.cancelled():
            return
        try:
            self._engine.submit(self._next, prompt, sampling)
        except ValueError as error:
            self._give(response, error)
        else:
            self._open[self._next] = prompt, sampling, response
        self._next += 1

    @staticmethod
    def _give(response: asyncio.Future[Samples], outcome: Samples | ValueError) -> None:
        def give() -> None:
            if response.done():  # no one waits any more
                return
            if isinstance(outcome, ValueError):
                response.set_exception(outcome)
            else:
                response.set_result(outcome)

        response.get_loop().call_soon_threadsafe(give)


async def side_by_side(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all calls, which run side by side; where one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
