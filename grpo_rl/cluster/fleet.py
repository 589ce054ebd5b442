"""Fleet: several engines behind one, groups routed by load, the dead replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from grpo_rl.engines.base import EngineDeadError, EngineLostError, EngineStartError


class Closable(Protocol):
    """What a fleet is of."""

    async def close(self) -> None:
        """Ends it; may be called on a dead one."""
        ...


RETRY_S = 30.0
"""Seconds until an engine for which there was no room is started once more."""

FIRST_RETRY_S = 2.0
"""Seconds until an engine that died while it started is started once more; twice as many after each try."""

E = TypeVar("E", bound=Closable)
R = TypeVar("R")


@dataclass(eq=False)
class _Berth(Generic[E]):
    """A place for an engine, and what it has to do, in answers; a newcomer has no weights yet."""

    number: int
    engine: E | None = None
    newcomer: E | None = None
    load: int = 0
    launches: int = 0
    launching: bool = False


class Fleet(Generic[E]):
    """Engines that hold one policy; each call goes to the one with the least to do.

    All answers of a group go to one engine, which computes their prompt once. Continuous batching keeps long answers
    from holding up short ones within an engine. An engine answers nothing before it
    has weights: from :meth:`push`, or as :meth:`admit` says.

    Args:
        launch: starts the engine of a place.
        size: how many.
        max_restarts: how often the engine of one place is replaced before the run ends.

    Raises:
        ValueError: ``size`` is less than 1.
    """

    def __init__(self, launch: Callable[[int], Awaitable[E]], size: int, max_restarts: int = 3) -> None:
        if size < 1:
            raise ValueError(f"a fleet of {size} engines; it needs at least one")
        self._launch, self._max_restarts = launch, max_restarts
        self._berths = [_Berth[E](number) for number in range(size)]
        self._starts: set[asyncio.Task[None]] = set()
        self._lost: EngineDeadError | None = None
        self._change = asyncio.Event()
        self.restarts = 0
        """Engines that were or are to be replaced, so far."""
        self.news: list[str] = []
        """What became of engines; whoever reads it takes it out."""

    async def start(self) -> None:
        """Launches all engines.

        Raises:
            Exception: of the first that can't be.
        """
        starts = [asyncio.create_task(self._fill(berth)) for berth in self._berths]
        self._starts |= set(starts)
        await asyncio.gather(*starts)

    async def _fill(self, berth: _Berth[E]) -> None:
        """Launches an engine; one that dies while it starts is replaced like any other, as often in all."""
        berth.launching, pause_s = True, FIRST_RETRY_S
        try:
            while berth.newcomer is None:
                try:
                    berth.newcomer = await self._launch(berth.number)
                except EngineStartError as error:
                    if berth.launches >= self._max_restarts:
                        raise
                    self.restarts += 1
                    self.news.append(f"{_in_short(error)}. It is replaced")
                    await asyncio.sleep(pause_s)
                    pause_s = min(RETRY_S, 2 * pause_s)
                berth.launches += 1
        finally:
            berth.launching = False
        self._change.set()

    async def call(self, work: Callable[[E], Awaitable[R]], answers: int = 1) -> R:
        """What ``work`` returns of the engine that has the least to do.

        Args:
            answers: how much that is.

        Raises:
            EngineLostError: the engine died; a new call goes to another, or to the one that replaces it.
            EngineDeadError: engines died too often.
        """
        berth = await self._least_loaded()
        engine = berth.engine
        assert engine is not None
        berth.load += answers
        try:
            return await work(engine)
        except EngineDeadError as error:
            self._replace(berth, engine, error)
            raise EngineLostError(str(error)) from error
        finally:
            berth.load -= answers

    async def _least_loaded(self) -> _Berth[E]:
        while not (afloat := [berth for berth in self._berths if berth.engine is not None]):
            await self._changed()
        if self._lost:
            raise self._lost
        return min(afloat, key=lambda berth: (berth.load, berth.number))

    async def _changed(self) -> None:
        """Returns when an engine has come, gone or got weights.

        Raises:
            EngineDeadError: engines died too often.
        """
        if not self._lost:
            self._change.clear()
            await self._change.wait()
        if self._lost:
            raise self._lost

    def _replace(self, berth: _Berth[E], engine: E, error: EngineDeadError) -> None:
        """Replaces the engine, once, however many calls found it dead."""
        if engine not in (berth.engine, berth.newcomer):
            return
        berth.engine = berth.newcomer = None
        if berth.launches > self._max_restarts:
            self._lost = EngineDeadError(
                f"{error}; place {berth.number} has lost {berth.launches} (inference_model.max_restarts="
                f"{self._max_restarts})"
            )
            self._change.set()
            return
        self.restarts += 1
        berth.launching = True
        self.news.append(f"{error}. It is replaced, and what it was answering is sampled again")
        task = asyncio.create_task(self._relaunch(berth, engine))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _relaunch(self, berth: _Berth[E], dead: E) -> None:
        """Starts an engine in the place of a dead one; while there is no room for it, the others go on without."""
        with contextlib.suppress(Exception):  # it is dead, and has nothing to say any more
            await dead.close()
        while True:
            try:
                return await self._fill(berth)
            except Exception as error:
                why = f"engine {berth.number} can't be started again: {error}"
                if not any(
                    other.engine or other.newcomer or other.launching for other in self._berths if other is not berth
                ):
                    self._lost = EngineDeadError(why)
                    self._change.set()
                    return
                self.news.append(f"{why}. The others go on without it; it is tried again")
                await asyncio.sleep(RETRY_S)

    async def newcomer(self) -> None:
        """Returns when an engine is there that has no weights yet.

        Raises:
            EngineDeadError: engines died too often.
        """
        while not any(berth.newcomer for berth in self._berths):
            await self._changed()

    async def present(self) -> list[E]:
        """The engines that are there, those without weights among them.

        Raises:
            EngineDeadError: engines died too often.
        """
        if self._lost:
            raise self._lost
        return [engine for berth in self._berths if (engine := berth.newcomer or berth.engine) is not None]

    async def admit(self, engines: Collection[E]) -> None:
        """These have weights now, and answer from now on."""
        for berth in self._berths:
            if berth.newcomer in engines:
                berth.engine, berth.newcomer = berth.newcomer, None
                if berth.launches > 1:
                    self.news.append(f"engine {berth.number} is back")
        self._change.set()

    async def lose(self, engine: E, error: EngineDeadError) -> None:
        """Replaces an engine that was found dead.

        Raises:
            EngineDeadError: engines died too often.
        """
        for berth in self._berths:
            self._replace(berth, engine, error)
        if self._lost:
            raise self._lost

    async def push(self, work: Callable[[E], Awaitable[R]], newcomers: bool = False) -> list[R]:
        """What ``work``, which gives an engine weights, returns of each; one that dies of it is replaced and left out.

        Args:
            newcomers: only to those that have none.
        """

        async def one(berth: _Berth[E], engine: E) -> list[R]:
            try:
                result = await work(engine)
            except EngineDeadError as error:
                self._replace(berth, engine, error)
                return []
            await self.admit([engine])
            return [result]

        places = [
            (berth, engine)
            for berth in self._berths
            if (engine := berth.newcomer or (None if newcomers else berth.engine)) is not None
        ]
        results = await asyncio.gather(*(one(berth, engine) for berth, engine in places))
        return [result for of_one in results for result in of_one]

    async def serve(self, awaited: Awaitable[R], push: Callable[[], Awaitable[object]]) -> R:
        """What is waited for; meanwhile ``push`` gives weights to the engines that come, without which it may not come.

        Raises:
            EngineDeadError: engines died too often.
        """
        task = asyncio.ensure_future(awaited)
        try:
            while not task.done():
                news = asyncio.ensure_future(self.newcomer())
                try:
                    await asyncio.wait({task, news}, return_when=asyncio.FIRST_COMPLETED)
                    if news.done():
                        news.result()
                        await push()
                finally:
                    news.cancel()
            return task.result()
        finally:
            task.cancel()

    async def close(self) -> None:
        """Ends every engine, and every launch."""
        for task in list(self._starts):
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        engines = [engine for berth in self._berths if (engine := berth.engine or berth.newcomer) is not None]
        await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)


def _in_short(error: Exception) -> str:
    """The error's first line, and its last one, in which a traceback ends on the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(dict.fromkeys(line.rstrip(".:") for line in (lines[0], lines[-1]))) if lines else repr(error)
