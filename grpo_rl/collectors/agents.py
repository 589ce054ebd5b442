"""AgentGroups: groups whose responses are the sessions of agents, which call the policy through an endpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from grpo_rl.collectors.agent_sessions import AgentSessions, AgentSettings, Played, Sample
from grpo_rl.collectors.groups import rewarded
from grpo_rl.collectors.sequences import group_of_sequences
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.base import LLMEnv, Prompt, Reward


class AgentGroups:
    """Plays groups of sessions, all at the same time, and judges them.

    A session whose agent fails, is late or is killed is left out of its group, as a response whose scorer failed.

    Args:
        env: environment whose rows the sessions are about, and whose task scores them.
        settings: of the agent.
        sampling: of each response, for all that requests leave open.
        max_model_len: most tokens of a prompt and its response.
    """

    def __init__(self, env: LLMEnv, settings: AgentSettings, sampling: Sampling, max_model_len: int) -> None:
        self._env, self._agent = env, settings.agent
        self._sessions = AgentSessions(env, settings, sampling, max_model_len)
        self._scorers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scores")  # scores one group at a time
        self._counts: Counter[str] = Counter()

    async def play(self, prompt: Prompt, group_size: int, sample: Sample) -> Group | None:
        """The group of one row, with its rewards; None where fewer than two of its sessions have one."""
        row, seeds = self._env.task.rows[prompt.row], [prompt.group_id * 100_003 + i for i in range(group_size)]
        found = await self._sessions.play(row, f"row {prompt.row}", seeds, sample)
        return await asyncio.get_running_loop().run_in_executor(self._scorers, self._judged, prompt, found)

    def _judged(self, prompt: Prompt, sessions: Sequence[Played]) -> Group | None:
        for played in sessions:
            self._counts.update(played.session.counts)
        self._counts["sessions"] += len(sessions)
        results = self._sessions.judge(self._env.task.rows[prompt.row], f"row {prompt.row}", sessions)
        kept = [(one, result) for one, result in zip(sessions, results, strict=True) if isinstance(result, Reward)]
        if len(kept) < 2:
            return None
        recorded = [(played, result, sequence) for played, result in kept for sequence in played.session.sequences()]
        self._counts["sequences"] += len(recorded)
        # A group has one prompt, of a token at least; a chat template begins all conversations alike, as a rule.
        begin = Counter(sequence.prompt_ids[0] for *_, sequence in recorded).most_common(1)[0][0]
        self._counts["left_out"] += sum(sequence.prompt_ids[0] != begin for *_, sequence in recorded)
        recorded = [entry for entry in recorded if entry[2].prompt_ids[0] == begin]
        if len({played.number for played, *_ in recorded}) < 2:
            return None
        group = group_of_sequences(prompt, [sequence for *_, sequence in recorded])
        group = replace(group, sessions=torch.tensor([played.number for played, *_ in recorded]))
        return rewarded(group, [result for _, result, _ in recorded])

    def metrics(self) -> dict[str, float]:
        """Counts of sessions, calls and sequences so far; see `grpo_rl.agents.recorder.Session.counts`."""
        names = ("sessions", "calls", "extended", "rewritten", "branches", "sequences", "left_out")
        return {f"agents/{name}": self._counts[name] for name in names}

    def events(self) -> list[str]:
        """See :meth:`AgentSessions.events`."""
        return self._sessions.events()

    def state(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return dict(self._counts)

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on counting from :meth:`state`."""
        self._counts = Counter(state)

    async def close(self) -> None:
        """Ends sessions under way, and the server."""
        await asyncio.to_thread(self._agent.close)  # it waits until what it kills has ended
        await self._sessions.close()
        self._scorers.shutdown(wait=False, cancel_futures=True)
