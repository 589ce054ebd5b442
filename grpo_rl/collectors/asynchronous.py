"""OverlappedCollector: samples groups while others are trained on; for the training loop it is like SyncCollector."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from typing import Any

from grpo_rl.cluster.fleet_engine import FleetEngine
from grpo_rl.collectors.multi_turn import begin, converse, group_of_trajectories, judge
from grpo_rl.collectors.rollout_scheduler import Dropped, Flow
from grpo_rl.collectors.staleness import Ledger
from grpo_rl.collectors.sync import group_of_samples, rewarded, rewarded_alike
from grpo_rl.data.group import Group
from grpo_rl.engines.base import AsyncEngine, Samples, Sampling
from grpo_rl.envs.base import LLMEnv, Prompt


class OverlappedCollector:
    """Hands out collections of ``env.num_envs`` groups, and goes on sampling meanwhile, up to the bound on staleness.

    Every group that is started is handed out once, or dropped and counted by its reason.

    Args:
        env: gives prompts and scores answers.
        engine: the fleet that samples.
        sampling: how; of each turn, where the task replies.
        total_dialog_turns: answers to sample in all, over all runs of a resumed training.
        max_staleness: policy versions that a token may be old when it is trained on.
        version: of the weights that are trained first.
        drops_alike: groups that are rewarded alike are dropped, and others take their places: dynamic sampling.
        alike: which these are.
    """

    def __init__(
        self,
        env: LLMEnv,
        engine: FleetEngine,
        sampling: Sampling,
        total_dialog_turns: int,
        max_staleness: int,
        version: int = 0,
        drops_alike: bool = False,
        alike: Callable[[Group], bool] = rewarded_alike,
    ) -> None:
        self._env, self._engine, self._sampling = env, engine, sampling
        self._total, self._drops_alike, self._alike = total_dialog_turns, drops_alike, alike
        self._scorers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scores")  # a task is asked once at a time
        self.ledger = Ledger(env.num_envs, max_staleness, version)
        self._flow = Flow(self.ledger, self._ask, self._answer)
        self.repeats = env.repeats
        """Answers to each of the next prompts."""
        self.sample_s = 0.0
        """Seconds that the last collection was waited for."""
        self.sampled: list[Group] = []
        """The groups of the last collection, and those that were left out as rewarded alike since the one before."""
        self.collected = 0
        """Answers sampled so far whose groups were handed out or dropped."""
        self._alike_groups: list[Group] = []
        self._account: dict[str, float] = {}

    def collect(self) -> list[Group]:
        """The groups of the next training step; fewer at the end, and then none.

        Raises:
            Exception: what ended the sampling: too many engines died, too many scorers failed.
        """

        async def batch() -> list[Group]:  # on the loop, where nothing else counts meanwhile
            groups = await self._flow.batch()
            self.sampled, self._alike_groups = [*groups, *self._alike_groups], []
            self._take_stock()
            return groups

        start = time.perf_counter()
        groups = self._engine.wait(batch())
        self.sample_s = time.perf_counter() - start
        return groups

    def _take_stock(self) -> None:
        ledger = self.ledger
        self.collected = (ledger.trained + ledger.dropped.total()) * self._env.repeats
        self._account = {
            "groups/started": ledger.started,
            "groups/trained": ledger.trained,
            "groups/open": len(ledger.open),
            "groups/resampled": self._flow.resampled,
            "engines/replaced": self._engine.fleet.restarts,
            **{f"groups/dropped_{reason}": count for reason, count in ledger.dropped.items()},
        }

    def advance(self) -> None:
        """To be called when the engines hold the weights of the step that is over."""

        async def advance() -> None:
            self._flow.advance()

        self._engine.loop.run(advance())

    def state(self) -> dict[str, Any]:
        """Where the collection of the run stands, for a checkpoint: groups that are answered and wait are kept."""

        async def state() -> dict[str, Any]:  # on the loop, where nothing is asked meanwhile
            groups = [
                {"version": version, "prompt": asdict(prompt), "group": None if group is None else _fields(group)}
                for version, prompt, group in self._flow.open()
            ]
            return {
                "env": json.dumps(self._env.state_dict()),
                "trained": self.ledger.trained,
                "dropped": dict(self.ledger.dropped),
                "resampled": self._flow.resampled,
                "replaced": self._engine.fleet.restarts,
                "open": groups,
            }

        return self._engine.loop.run(state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`: prompts that were in flight are asked again."""

        async def restore() -> None:
            self._env.load_state_dict(json.loads(state["env"]))
            self.ledger.trained, self.ledger.dropped = state["trained"], Counter(state["dropped"])
            self.ledger.started = self.ledger.trained + self.ledger.dropped.total()
            self._flow.resampled = state["resampled"]
            self._engine.fleet.restarts += state.get("replaced", 0)  # older checkpoints do not say
            self._take_stock()
            self._flow.reopen(
                (saved["version"], Prompt(**saved["prompt"]), saved["group"] and Group(**saved["group"]))
                for saved in state["open"]
            )

        self._engine.loop.run(restore())

    def metrics(self) -> dict[str, float]:
        """The account when the last collection was handed out: what was started was trained on, dropped, or is open."""
        return self._account

    def news(self) -> list[str]:
        """What became of engines since the last call."""
        news, self._engine.fleet.news = self._engine.fleet.news, []
        return news

    def close(self) -> None:
        """Ends what is in flight; engines go on to live."""
        self._engine.loop.run(self._flow.close())
        self._scorers.shutdown(wait=False, cancel_futures=True)

    def _ask(self) -> Prompt | None:
        if self.ledger.started * self.repeats >= self._total:
            return None
        return self._env.next_prompts(1)[0]

    async def _answer(self, prompt: Prompt) -> Group:
        work = self._converse if self._env.max_turns > 1 else self._sample
        group = await self._engine.fleet.call(lambda engine: work(engine, prompt), self.repeats)
        if group is None:
            raise Dropped("unrewarded")
        if self._drops_alike and self._alike(group):
            self._alike_groups.append(group)
            raise Dropped("alike")
        return group

    async def _sample(self, engine: AsyncEngine, prompt: Prompt) -> Group | None:
        name = f"group-{prompt.group_id}-{self._flow.resampled}"
        samples = await engine.generate(name, prompt.ids.tolist(), self.repeats, self._sampling)
        results = await self._in_turn(lambda: self._env.score(prompt.row, samples.responses))
        return rewarded(group_of_samples(prompt, samples), results)

    async def _converse(self, engine: AsyncEngine, prompt: Prompt) -> Group | None:
        """All conversations of a group, on one engine, which holds what was said in its cache."""
        env, ids = self._env, prompt.ids.tolist()
        row = env.task.rows[prompt.row]
        played = [begin(env, row, f"row {prompt.row}", ids) for _ in range(self.repeats)]

        async def play(i: int) -> None:
            turn = itertools.count()

            def ask(ids: Sequence[int], sampling: Sampling) -> Awaitable[Samples]:
                name = f"group-{prompt.group_id}-{self._flow.resampled}-{i}-{next(turn)}"
                return engine.generate(name, ids, 1, sampling)

            await converse(env, played[i], ask, self._sampling, engine.max_model_len)

        conversations = [asyncio.ensure_future(play(i)) for i in range(self.repeats)]
        try:
            await asyncio.gather(*conversations)
        finally:
            for conversation in conversations:
                conversation.cancel()
        results = await self._in_turn(lambda: judge(env, played))
        return rewarded(group_of_trajectories(prompt, played), results)

    async def _in_turn(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._scorers, work)


def _fields(group: Group) -> dict[str, Any]:
    return {field.name: getattr(group, field.name) for field in fields(group)}
