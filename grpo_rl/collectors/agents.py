"""AgentGroups: groups whose responses are the sessions of agents, which call the policy through an endpoint.

For collections in turns the engine is one that the calling thread steps.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from grpo_rl.collectors.agent_sessions import AgentSessions, AgentSettings, Played, Sample
from grpo_rl.collectors.groups import group_of_trajectories, rewarded
from grpo_rl.data.batching import common_length
from grpo_rl.data.group import Group, Trajectory
from grpo_rl.engines.base import Sampler, Sampling
from grpo_rl.engines.loop_thread import LoopThread, SteppedEngine
from grpo_rl.envs.base import LLMEnv, Prompt, Reward


class AgentGroups:
    """Plays groups of sessions, all at the same time, and judges them.

    A session whose agent fails, is late or is killed is left out of its group, as a response whose scorer failed.

    The arguments are those of :class:`AgentSessions`.
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
        recorded = [(played, reward, sequence) for played, reward in kept for sequence in played.session.sequences()]
        self._counts["sequences"] += len(recorded)
        # A group has one prompt, of a token at least; a chat template begins all conversations alike, as a rule.
        begin = Counter(sequence.prompt_ids[0] for *_, sequence in recorded).most_common(1)[0][0]
        self._counts["left_out"] += sum(sequence.prompt_ids[0] != begin for *_, sequence in recorded)
        recorded = [entry for entry in recorded if entry[2].prompt_ids[0] == begin]
        if len({played.number for played, *_ in recorded}) < 2:
            return None
        group = group_of_sequences(prompt, [sequence for *_, sequence in recorded])
        group = replace(group, sessions=torch.tensor([played.number for played, *_ in recorded]))
        return rewarded(group, [reward for _, reward, _ in recorded])

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


def group_of_sequences(prompt: Prompt, sequences: Sequence[Trajectory]) -> Group:
    """The sequences about one row as a group, not yet rewarded.

    The group's prompt is what all of their prompts begin with. The rest of each is the beginning of its response, which
    is not trained on.

    >>> short, long = (Trajectory(prompt_ids=[1, 2, *rest]) for rest in ([], [3]))
    >>> for one in (short, long):
    ...     one.sampled(torch.tensor([5]), torch.tensor([-0.5]), torch.tensor([3]))
    >>> group = group_of_sequences(Prompt(0, 0, "?", torch.tensor([9])), [short, long])
    >>> group.prompt_ids.tolist(), group.response_ids.tolist(), group.trainable.tolist(), group.versions.tolist()
    ([1, 2], [5, 3, 5], [True, False, True], [3, 3, 3])
    """
    prompts = [torch.tensor(sequence.prompt_ids).numpy() for sequence in sequences]
    shared = min(common_length(prompts[0], other) for other in prompts)
    whole = torch.tensor(sequences[0].prompt_ids[:shared], dtype=torch.long)
    return group_of_trajectories(
        prompt.group_id, prompt.row, whole, [_behind(sequence, shared) for sequence in sequences]
    )


def _behind(sequence: Trajectory, shared: int) -> Trajectory:
    """The sequence with the prompt's ids behind the shared ones as a piece that the policy read."""
    made = Trajectory(routes=sequence.routes, truncated=sequence.truncated)
    version = next((int(versions[0]) for versions in sequence.versions if len(versions)), 0)
    made.read(torch.tensor(sequence.prompt_ids[shared:], dtype=torch.long), version)
    for name in ("ids", "log_probs", "versions", "trainable", "kept"):
        getattr(made, name).extend(getattr(sequence, name))
    return made


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
