"""RolloutScheduler: groups are sampled while others are trained on, as far as the bound on staleness allows.

It knows neither engines nor tasks: its caller gives the next prompts and samples their groups.
So the same code runs over real engines and in simulated time (`benchmarks/simulator.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from grpo_rl.collectors.staleness import InFlightGroup, StalenessManager
from grpo_rl.engines.base import EngineLostError
from grpo_rl.waits.registry import waiting

Prompt = TypeVar("Prompt")
Rollout = TypeVar("Rollout")


class Dropped(Exception):
    """A group will never be complete; the message is a word or two, by which such groups are counted."""


class RolloutScheduler(Generic[Prompt, Rollout]):
    """Keeps as many groups in flight as the bound on staleness allows, and hands out batches.

    Args:
        staleness: manager whose bound on staleness holds.
        next_prompt: gives the prompt of the next group; None when there is none any more.
        sample: samples and rewards a group. Raises EngineLostError where it has to be sampled again, and Dropped where
            it will never be complete; any other error ends the sampling and reaches :meth:`batch`.
    """

    def __init__(
        self,
        staleness: StalenessManager,
        next_prompt: Callable[[], Prompt | None],
        sample: Callable[[Prompt], Awaitable[Rollout]],
    ) -> None:
        self.staleness = staleness
        self.resampled = 0
        """Groups sampled again so far, because their engine died."""
        self._next_prompt, self._sample = next_prompt, sample
        self._no_prompt_left = False
        self._prompts: dict[int, Prompt] = {}
        self._rollouts: dict[int, Rollout] = {}
        self._again: deque[Prompt] = deque()
        self._tasks: list[asyncio.Task[None]] = []  # in order: a simulated run has to replay
        self._error: BaseException | None = None
        self._change = asyncio.Event()

    def fill(self) -> None:
        """Starts as many groups as the bound allows; called whenever that may have become more."""
        while not self._no_prompt_left and self.staleness.room() > 0:
            prompt = self._again.popleft() if self._again else self._next_prompt()
            if prompt is None:
                self._no_prompt_left = True
                self._change.set()
                return
            group = self.staleness.start()
            self._prompts[group.number] = prompt
            task = asyncio.create_task(self._run(group, prompt))
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)

    def open(self) -> list[tuple[int, Prompt, Rollout | None]]:
        """Version, prompt and rollout of each group that is neither handed out nor dropped; None: in flight."""
        groups = [
            (group.version, self._prompts[group.number], self._rollouts.get(group.number))
            for group in self.staleness.open
        ]
        return [*groups, *((self.staleness.version, prompt, None) for prompt in self._again)]

    def reopen(self, groups: Iterable[tuple[int, Prompt, Rollout | None]]) -> None:
        """Goes on with the groups of :meth:`open`: those in flight are sampled again, before anything else is."""
        for version, prompt, rollout in groups:
            if rollout is None:
                self._again.append(prompt)
                continue
            group = self.staleness.start()
            group.version = version
            self._prompts[group.number], self._rollouts[group.number] = prompt, rollout
            self.staleness.finish(group)

    async def _run(self, group: InFlightGroup, prompt: Prompt) -> None:
        try:
            while True:
                try:
                    self._rollouts[group.number] = await self._sample(prompt)
                except EngineLostError:
                    self.staleness.restart(group)
                    self.resampled += 1
                else:
                    self.staleness.finish(group)
                    break
        except Dropped as drop:
            self.staleness.drop(group, str(drop))
            del self._prompts[group.number]
        except Exception as error:
            self._error = error
        try:
            self.fill()  # in the place of what was dropped
        except Exception as error:
            self._error = error
        self._change.set()

    async def batch(self) -> list[Rollout]:
        """The groups of the next step, as soon as the bound releases them; fewer at the end, and then none.

        Raises:
            Exception: what ended the sampling of a group.
        """
        self.fill()
        while True:
            if self._error:
                raise self._error
            groups = self.staleness.take(last=self._no_prompt_left)
            if groups is not None:
                for group in groups:
                    del self._prompts[group.number]
                return [self._rollouts.pop(group.number) for group in groups]
            if self._no_prompt_left and not self.staleness.open:
                return []
            self._change.clear()
            in_flight = f"{len(self._tasks)} in flight, {len(self._rollouts)} complete"
            with waiting("a group to be complete", in_flight, math.inf, self.staleness.version):
                await self._change.wait()

    def advance(self, version: int) -> None:
        """Ends the step: engines hold this version, and further groups may start."""
        self.staleness.advance(version)
        self.fill()

    async def close(self) -> None:
        """Cancels the groups in flight."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
