"""Agents' sessions over an engine that the calling thread steps: groups of training, and sessions of held-out rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from grpo_rl.agents.stepping import SteppedEngine
from grpo_rl.collectors.agent_sessions import AgentSessions, AgentSettings, Played
from grpo_rl.collectors.agents import AgentGroups
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Sampler, Sampling
from grpo_rl.engines.loop_thread import LoopThread
from grpo_rl.envs.base import Failure, LLMEnv, Prompt, Reward


class SteppedGroups:
    """Groups of sessions for a collector that samples and trains in turns.

    Args:
        groups: plays the sessions, on an event loop in a thread of its own.
        engine: an engine of this process, which the calling thread steps meanwhile.
    """

    def __init__(self, groups: AgentGroups, engine: Sampler) -> None:
        self.groups, self._engine, self._loop = groups, SteppedEngine(engine), LoopThread()

    def play(self, prompts: Sequence[Prompt], group_size: int) -> list[Group | None]:
        """See :meth:`AgentGroups.play`, of several rows at the same time."""

        async def all_groups() -> list[Group | None]:
            playing = (self.groups.play(prompt, group_size, self._engine.sample) for prompt in prompts)
            return list(await asyncio.gather(*playing))

        return self._engine.run(self._loop.start(all_groups()))

    def close(self) -> None:
        """Ends what is under way, and the thread."""
        self._loop.run(self.groups.close())
        self._loop.close()


def play_held_out(
    env: LLMEnv,
    engine: Sampler,
    rows: Sequence[dict[str, Any]],
    sampling: Sampling,
    samples: int,
    settings: AgentSettings,
) -> list[tuple[Played, Reward | Failure]]:
    """Sessions about held-out rows with their rewards, those about one row side by side.

    They have an endpoint and a guard of their own: nothing of them is counted or trained on with the sessions of
    training. Their problems are told once, where those of scorers are.

    Args:
        samples: sessions about each row.
    """
    guard, stepped = env.held_out_guard, SteppedEngine(engine)
    sessions = AgentSessions(env, settings, sampling, engine.max_model_len, guard)
    named = [(f"held-out row {i}", row) for i, row in enumerate(rows)]

    async def all_rows() -> list[list[Played]]:
        seeds = [[i * 100_003 + number for number in range(samples)] for i in range(len(rows))]
        playing = (sessions.play(row, where, seeds[i], stepped.sample) for i, (where, row) in enumerate(named))
        return list(await asyncio.gather(*playing))

    loop = LoopThread()
    try:
        played = stepped.run(loop.start(all_rows()))
    finally:
        loop.run(sessions.close())
        loop.close()
    found: list[tuple[Played, Reward | Failure]] = []
    for (where, row), own in zip(named, played, strict=True):
        found += zip(own, sessions.judge(row, where, own), strict=True)
    for kind, text in sessions.told().items():
        guard.tell_once(kind, text)
    return found
