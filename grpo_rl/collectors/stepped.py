"""SteppedGroups: agents' sessions over an engine of this process, which samples and trains in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpo_rl.agents.stepping import SteppedEngine
from grpo_rl.collectors.agents import AgentGroups
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Sampler
from grpo_rl.engines.loop_thread import LoopThread
from grpo_rl.envs.base import Prompt


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
