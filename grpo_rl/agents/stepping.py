"""SteppedEngine: an engine that one thread steps, called from an event loop in another."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

from grpo_rl.engines.base import EngineDeadError, Sampler, Samples, Sampling, reason
from grpo_rl.waits.registry import waiting

T = TypeVar("T")
_Call = tuple[Sequence[int], Sampling, asyncio.Future[Samples]]
IDLE_S = 0.02
"""Seconds that one wait for calls takes while the engine has nothing to do."""


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
