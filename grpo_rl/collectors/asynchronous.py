"""AsyncCollector: samples groups while others are trained on; for the training loop it is like SyncCollector.

`act`, `play` and `gathered` make rollouts with an engine that is awaited, each by itself: a slow tool holds up its own
conversation alone.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchrl.envs import EnvBase
from typing_extensions import override

from grpo_rl.collectors.base import Collector, Sampled, env_state, restore_env
from grpo_rl.collectors.engine_policy import (
    Rollout,
    Row,
    append_steps,
    at_own_pace,
    by_prompt,
    note,
    reset_rows,
    step,
    step_in_thread,
    turn_sampling,
    write,
)
from grpo_rl.collectors.groups import group_of_rollouts, has_zero_variance
from grpo_rl.collectors.rollout_scheduler import Dropped, RolloutScheduler, StalenessManager
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.engines.loop_thread import AsyncEngine, side_by_side
from grpo_rl.envs.base import LLMEnv, Prompt
from grpo_rl.waits import waiting

if TYPE_CHECKING:
    from grpo_rl.cluster.fleet import FleetEngine
    from grpo_rl.collectors.agents import AgentGroups
    from grpo_rl.weights.push import WeightSync

Respond = Callable[[Sequence[Row]], Awaitable[None]]
Step = Callable[[EnvBase, Sequence[Row]], Awaitable[list[Row]]]
Sample = Callable[[Sequence[int], int, Sampling], Awaitable[Samples]]
"""Samples so many responses to a prompt, on an engine that is awaited."""


class AsyncCollector(Collector):
    """Hands out collections of ``env.num_envs`` groups, and goes on sampling meanwhile, up to the bound on staleness.

    Every group that is started is handed out once, or dropped and counted by its reason. At the end a collection has
    fewer groups, and then none. :meth:`collect` raises what ended the sampling: too many engines died, or too many
    scorers failed.

    Args:
        env: environment that gives prompts and scores responses.
        engines: fleet that samples the groups; a group whose engine died is sampled again on another.
        sampling: settings of sampling; if the task replies, they hold for each turn.
        total_dialog_turns: responses to sample in all, over all runs of a resumed training.
        weights: owner of the policy version; a push ends the step and makes room for other groups.
        max_staleness: policy versions that a token may be old when it is trained on.
        collected: responses sampled before, when a run is resumed.
        drops_zero_variance: groups without signal are dropped, and others take their places: dynamic sampling.
        has_no_signal: which these are.
        agents: plays sessions of agents in the place of responses and conversations.
    """

    def __init__(
        self,
        env: LLMEnv,
        engines: FleetEngine,
        sampling: Sampling,
        total_dialog_turns: int,
        weights: WeightSync,
        max_staleness: int,
        collected: int = 0,
        drops_zero_variance: bool = False,
        has_no_signal: Callable[[Group], bool] = has_zero_variance,
        agents: AgentGroups | None = None,
    ) -> None:
        self._agents, self.weights = agents, weights
        self._env, self._engines, self._sampling = env, engines, sampling
        self._total, self._group_size, self._begun = total_dialog_turns, env.repeats, False
        self._drops_zero_variance, self._has_no_signal = drops_zero_variance, has_no_signal
        self._scorers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scores")  # scores one group at a time
        self.staleness = StalenessManager(env.num_envs, max_staleness, weights.version)
        self._scheduler = RolloutScheduler(self.staleness, self._next_prompt, self._sample)
        self.sample_s = 0.0
        self.sampled: list[Group] = []
        """The groups of the last collection, and zero-variance groups that were dropped since the one before."""
        self.collected = collected
        """Responses sampled so far whose groups were handed out or dropped."""
        self._zero_variance: list[Group] = []
        self._metrics: dict[str, float] = {}
        self._sampled: list[Sampled] = []
        weights.subscribe(self._on_push)

    @override
    def collect(self) -> list[Group]:

        async def batch() -> list[Group]:  # on the loop, so the counters cannot change
            self._begun = True
            groups = await self._scheduler.batch()
            self.sampled, self._zero_variance = [*groups, *self._zero_variance], []
            self._take_stock()
            return groups

        start = time.perf_counter()
        groups = self._engines.wait(batch())
        self.sample_s = time.perf_counter() - start
        return groups

    def _take_stock(self) -> None:
        staleness = self.staleness
        self.collected = (staleness.trained + staleness.dropped.total()) * self._group_size
        self._metrics = {
            "groups/started": staleness.started,
            "groups/trained": staleness.trained,
            "groups/open": len(staleness.open),
            "groups/resampled": self._scheduler.resampled,
            "engines/replaced": self._engines.fleet.restarts,
            **{f"groups/dropped_{reason}": count for reason, count in staleness.dropped.items()},
            **(self._agents.metrics() if self._agents else {}),
        }

    def _on_push(self, version: int) -> None:
        async def advance() -> None:
            if self._begun:
                self._scheduler.advance(version)
            else:  # nothing was asked for yet
                self.staleness.advance(version)

        self._engines.loop.run(advance())

    def state_dict(self) -> dict[str, Any]:
        """The state of the run's collection, for a checkpoint: complete groups that wait are kept."""

        async def state() -> dict[str, Any]:  # on the loop, where nothing is started meanwhile
            groups = [
                {"version": version, "prompt": asdict(prompt), "group": group and dict(vars(group))}
                for version, prompt, group in self._scheduler.open()
            ]
            return {
                **env_state(self._env),
                "trained": self.staleness.trained,
                "dropped": dict(self.staleness.dropped),
                "resampled": self._scheduler.resampled,
                "replaced": self._engines.fleet.restarts,
                "open": groups,
                "zero_variance": [dict(vars(group)) for group in self._zero_variance],
                "agents": self._agents.state() if self._agents else {},
            }

        return self._engines.loop.run(state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`: groups that were in flight are sampled again."""

        async def restore() -> None:
            restore_env(self._env, state)
            self.staleness.trained, self.staleness.dropped = state["trained"], Counter(state["dropped"])
            self.staleness.started = self.staleness.trained + self.staleness.dropped.total()
            self._scheduler.resampled = state["resampled"]
            self._engines.fleet.restarts += state["replaced"]
            if self._agents:
                self._agents.restore(state["agents"])
            self._scheduler.reopen(
                (saved["version"], Prompt(**saved["prompt"]), saved["group"] and Group(**saved["group"]))
                for saved in state["open"]
            )
            self._zero_variance = [Group(**saved) for saved in state["zero_variance"]]

        self._engines.loop.run(restore())

    def metrics(self) -> dict[str, float]:
        """Counts at the last collection: every group that was started is trained on, dropped or open."""
        return self._metrics

    def events(self) -> list[str]:
        """Messages about engines that were lost or replaced since the last call, and about the requests of agents."""
        return self._engines.events() + (self._agents.events() if self._agents else [])

    @override
    def take_sampled(self) -> list[Sampled]:

        async def take() -> list[Sampled]:  # on the loop, where groups end
            sampled, self._sampled = self._sampled, []
            return sampled

        return self._engines.loop.run(take())

    def shutdown(self) -> None:
        """Cancels the groups in flight; the engines stay alive."""
        self._engines.loop.run(self._scheduler.close())
        if self._agents:
            self._engines.loop.run(self._agents.close())
        self._scorers.shutdown(wait=False, cancel_futures=True)

    def _next_prompt(self) -> Prompt | None:
        if self.staleness.started * self._group_size >= self._total:
            return None
        return self._env.next_prompts(1)[0]

    async def _sample(self, prompt: Prompt) -> Group:
        work = self._sessions if self._agents else self._rollouts
        group = await self._engines.fleet.call(lambda engine: work(engine, prompt), self._group_size)
        if group is None:
            raise Dropped("unrewarded")
        if self._drops_zero_variance and self._has_no_signal(group):
            self._zero_variance.append(group)
            raise Dropped("alike")  # the metric's name
        return group

    async def _rollouts(self, engine: AsyncEngine, prompt: Prompt) -> Group | None:
        """The rewarded group of a prompt, sampled on one engine, whose cache holds the turns before."""
        env, name = self._env, f"group-{prompt.group_id}-{self._scheduler.resampled}"
        together = at_own_pace(reset_rows(env, prompts=[prompt], repeats=self._group_size))
        stepping = self._step_in_turn if len(together) == 1 else step_in_thread
        names = [name] if len(together) == 1 else [f"{name}-{i}" for i in range(len(together))]
        with self._timed(engine, prompt) as ended:

            def responding(name: str) -> Respond:
                call = itertools.count()

                async def sample(ids: Sequence[int], n: int, sampling: Sampling) -> Samples:
                    samples = await engine.generate(f"{name}-{next(call)}", ids, n, sampling)
                    ended()
                    return samples

                return lambda rows: act(rows, sample, self._sampling, engine.max_model_len)

            rollouts = await gathered(
                play(env, rows, responding(name), stepping) for name, rows in zip(names, together, strict=True)
            )
        note(env, rollouts)
        return group_of_rollouts(rollouts)

    async def _sessions(self, engine: AsyncEngine, prompt: Prompt) -> Group | None:
        """The group of sessions about a prompt, on one engine, whose cache holds the turns before."""
        agents, call = self._agents, itertools.count()
        assert agents is not None

        def sample(ids: Sequence[int], sampling: Sampling) -> Awaitable[Samples]:
            name = f"agents-{prompt.group_id}-{self._scheduler.resampled}-{next(call)}"
            return engine.generate(name, ids, 1, sampling)

        with self._timed(engine, prompt):
            return await agents.play(prompt, self._group_size, sample)

    @contextmanager
    def _timed(self, engine: AsyncEngine, prompt: Prompt) -> Iterator[Callable[[], None]]:
        """Notes when the engine samples the group, also if it does not get to the end.

        Yields a function to call at the end of each response; without a call, the context's end counts.
        """
        begun_s, version, ended_s = time.perf_counter(), self.staleness.version, None

        def ended() -> None:
            nonlocal ended_s
            ended_s = time.perf_counter()

        try:
            yield ended
        finally:
            self._sampled.append(
                Sampled(engine.name, prompt.group_id, version, begun_s, ended_s or time.perf_counter())
            )

    async def _step_in_turn(self, env: EnvBase, rows: Sequence[Row]) -> list[Row]:
        with waiting("its group's turn at the scorer, and rewards", deadline_s=math.inf):
            return await asyncio.get_running_loop().run_in_executor(self._scorers, step, env, rows)


async def act(rows: Sequence[Row], sample: Sample, sampling: Sampling, max_model_len: int) -> None:
    """Writes a response into each row, as `grpo_rl.collectors.engine_policy.EnginePolicy` does, awaiting the engine."""

    async def of_prompt(prompt: tuple[int, ...], members: Sequence[Row]) -> None:
        settings = turn_sampling(len(prompt), sampling, max_model_len)
        write(members, await sample(prompt, len(members), settings), max_model_len)

    first, *others = [of_prompt(prompt, members) for (_, prompt), members in by_prompt(rows).items()]
    await (asyncio.gather(first, *others) if others else first)  # a single one at once


async def play(env: EnvBase, rows: Sequence[Row], respond: Respond, step: Step) -> list[Rollout]:
    """The rollouts of rows that go on together: those of one group, or a single one.

    Args:
        respond: writes the policy's responses into the rows.
        step: see :func:`step`; awaited, as scorers and tools take their time.
    """
    rollouts: list[Rollout] = [[] for _ in rows]
    ready = dict(enumerate(rows))
    while ready:
        await respond(list(ready.values()))
        append_steps(ready, rollouts, await step(env, list(ready.values())))
    return rollouts


async def gathered(work: Iterable[Coroutine[Any, Any, list[Rollout]]]) -> list[Rollout]:
    """All rollouts, in their order; where one raises, the others are cancelled."""
    first, *others = work
    if not others:  # at once: in a turn of the loop its engine could be lost
        return await first
    return [rollout for found in await side_by_side([first, *others]) for rollout in found]
