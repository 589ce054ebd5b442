"""RolloutScheduler: groups are sampled while others are trained on, as far as the bound on staleness allows.

It knows neither engines nor tasks: its caller gives the next prompts and samples their groups.
So the same code runs over real engines and in simulated time (`benchmarks/simulator.py`).
Letters: B groups of a training step, S the bound on staleness, in policy versions.

A group that was started under version v is due no later than in the step that trains version v + S: no token of it is
older than S versions then. Two rules of :class:`StalenessManager` keep that true without ever throwing a response away
for being late:

- No more than (S + 1) B groups are open at a time, as in AReaL, https://arxiv.org/abs/2505.24298, section 5.1, eq. 3.
- A step takes the groups that are due first among those that are finished, and waits while it would leave more
  groups for some later step than that step has room for (the feasibility of earliest deadline first).

So sampling waits only at the bound, and training only for a batch, or for a response that is S steps late.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from grpo_rl.engines.loop_thread import EngineLostError
from grpo_rl.waits import waiting


@dataclass(eq=False)
class InFlightGroup:
    """A group as the manager counts it, from its start until it is trained on or dropped.

    Args:
        number: in the order of starting.
        version: of the weights that it was started under.
    """

    number: int
    version: int
    finished: bool = False


@dataclass
class StalenessManager:
    """Counts the groups under the bound; it holds numbers, not groups, and never waits.

    Args:
        groups_per_step: B.
        max_staleness: S; with 0 no group is sampled while another is trained on.
        version: of the weights that the next step trains.

    With room for two steps, the first batch is trained while the second is sampled:

    >>> staleness = StalenessManager(groups_per_step=2, max_staleness=1)
    >>> groups = [staleness.start() for _ in range(staleness.room())]
    >>> for group in groups[1:]:
    ...     staleness.finish(group)
    >>> [group.number for group in staleness.take()], staleness.room()
    ([1, 2], 0)
    >>> staleness.advance(version=1); staleness.room(), staleness.take()
    (2, None)
    """

    groups_per_step: int
    max_staleness: int
    version: int = 0
    started: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    open: list[InFlightGroup] = field(default_factory=list)
    """Started, and neither trained on nor dropped, in the order of starting."""
    _in_training: int = 0

    def room(self) -> int:
        """The number of groups that may be started now."""
        held = len(self.open) + self._in_training
        return (self.max_staleness + 1) * self.groups_per_step - held

    def start(self) -> InFlightGroup:
        """Registers and returns a new group, which is about to be sampled under the present version."""
        assert self.room() > 0, "no group may be started now"
        group = InFlightGroup(self.started, self.version)
        self.started += 1
        self.open.append(group)
        return group

    def restart(self, group: InFlightGroup) -> None:
        """Registers that the group's responses are lost and it is sampled again; it still counts as started once."""
        self.open.remove(group)
        group.version, group.finished = self.version, False
        self.open.append(group)

    def finish(self, group: InFlightGroup) -> None:
        """Registers that the group is complete and waits to be trained on."""
        group.finished = True

    def drop(self, group: InFlightGroup, reason: str) -> None:
        """Registers that the group will not be trained on."""
        self.open.remove(group)
        self.dropped[reason] += 1

    def take(self, last: bool = False) -> list[InFlightGroup] | None:
        """The groups of the next step, in the order in which they are due; None while the step has to wait.

        Args:
            last: no group will be started any more, so that fewer than B are a batch once all are finished.
        """
        finished = [group for group in self.open if group.finished]
        everything = last and len(finished) == len(self.open) > 0
        if len(finished) < self.groups_per_step and not everything:
            return None
        finished.sort(key=lambda group: (group.version, group.number))
        chosen = finished[: self.groups_per_step]
        if any(self._left(chosen, later) > later * self.groups_per_step for later in range(self.max_staleness + 1)):
            return None
        for group in chosen:
            self.open.remove(group)
        self._in_training += len(chosen)
        self.trained += len(chosen)
        return chosen

    def _left(self, chosen: list[InFlightGroup], later: int) -> int:
        """Groups that would still be open, and that are due within so many steps after the next."""
        taken = set(map(id, chosen))
        due = self.version + later - self.max_staleness
        return sum(group.version <= due and id(group) not in taken for group in self.open)

    def advance(self, version: int) -> None:
        """Ends the step: engines hold this version, and the groups that were trained on no longer count as open."""
        self.version = version
        self._in_training = 0

    def check(self) -> None:
        """Asserts that every group that was started is exactly one of open, trained on and dropped."""
        accounted = len(self.open) + self.trained + self.dropped.total()
        assert accounted == self.started, f"{self.started} groups were started, and {accounted} are accounted for"


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
