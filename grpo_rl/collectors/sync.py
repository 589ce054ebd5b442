"""SyncCollector: sample, then train, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from grpo_rl.collectors.base import Collector, env_state, restore_env
from grpo_rl.collectors.engine_policy import Policy, note, play_all, reset_rows
from grpo_rl.collectors.groups import group_of_rollouts, has_zero_variance
from grpo_rl.data.group import Group
from grpo_rl.envs.base import LLMEnv, ScoreError

if TYPE_CHECKING:
    from grpo_rl.collectors.agents import SteppedGroups
    from grpo_rl.weights.push import WeightSync


class SyncCollector(Collector):
    """Gives collections: a group for each of the environment's ``num_envs`` prompts.

    A response whose scorer failed is left out of its group, and a group of fewer than two responses out of the
    collection: nothing could be compared. Both are counted.

    A collection of which no group is left up to ``total_dialog_turns`` is a ScoreError.

    With ``max_resamples``, zero-variance groups, which teach nothing, are left out as well, and others are sampled in
    their place: dynamic sampling, DAPO, https://arxiv.org/abs/2503.14476, section 3.2.

    Args:
        env: environment that gives prompts and scores responses.
        policy: an `EnginePolicy`, or any other that writes the policy's entries of `grpo_rl.data.keys`.
        total_dialog_turns: responses to sample in all, over all runs of a resumed training.
        collected: responses sampled before, when a run is resumed.
        max_resamples: how often at most one collection is filled up; zero-variance groups take what is left of it.
        has_no_signal: which groups teach nothing, where rewards are changed before they are compared.
        agents: plays sessions of agents in the place of responses and conversations.
        weights: what :meth:`update_policy_weights_` pushes.
    """

    def __init__(
        self,
        env: LLMEnv,
        policy: Policy,
        total_dialog_turns: int,
        collected: int = 0,
        max_resamples: int = 0,
        has_no_signal: Callable[[Group], bool] = has_zero_variance,
        agents: SteppedGroups | None = None,
        weights: WeightSync | None = None,
    ) -> None:
        self._env, self._policy, self.weights = env, policy, weights
        self._total, self._max_resamples, self._has_no_signal = total_dialog_turns, max_resamples, has_no_signal
        self.collected, self._agents = collected, agents
        self.sample_s = 0.0
        """Seconds that the policy took for the last collection."""
        self.dropped_groups = 0
        """Groups left out so far, as fewer than two of their responses had a reward."""
        self.filtered_groups = 0
        """Zero-variance groups left out so far."""
        self.sampled: list[Group] = []

    @override
    def collect(self) -> list[Group]:
        if self.collected >= self._total:
            return []
        wanted, resamples = self._env.num_envs, 0
        groups: list[Group] = []
        self.sampled, self.sample_s = [], 0.0
        while not self.sampled or (
            len(groups) < wanted and resamples < self._max_resamples and self.collected < self._total
        ):
            resamples += bool(self.sampled)
            judged = self._sample(wanted - len(groups))
            self.sampled += judged
            groups += [group for group in judged if not (self._max_resamples and self._has_no_signal(group))]
        # Groups compare by identity.
        groups += [group for group in self.sampled if group not in groups][: wanted - len(groups)]
        self.filtered_groups += len(self.sampled) - len(groups)
        return groups

    def state_dict(self) -> dict[str, Any]:
        """The state of the run's collection, data position included, for a checkpoint."""
        state = env_state(self._env) | {"left_out": [self.dropped_groups, self.filtered_groups]}
        return state | ({"agents": self._agents.groups.state()} if self._agents else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`; the constructor got how much was collected."""
        restore_env(self._env, state)
        self.dropped_groups, self.filtered_groups = state["left_out"]
        if self._agents:
            self._agents.groups.restore(state["agents"])

    def metrics(self) -> dict[str, float]:
        """Counts of the groups that were left out so far."""
        metrics: dict[str, float] = {"failed/groups": self.dropped_groups} if self.dropped_groups else {}
        if self._max_resamples:
            metrics["sample/filtered_groups"] = self.filtered_groups
        return metrics | (self._agents.groups.metrics() if self._agents else {})

    def events(self) -> list[str]:
        """Messages about the requests of agents: what else goes wrong here is raised."""
        return self._agents.groups.events() if self._agents else []

    def shutdown(self) -> None:
        """Ends the endpoint of agents, if there is one: between two collections no group is in flight."""
        if self._agents:
            self._agents.close()

    def _sample(self, count: int) -> list[Group]:
        """The groups of the next ``count`` prompts, those of fewer than two scored responses left out and counted."""
        group_size = self._env.repeats
        if self.dropped_groups and self.collected >= self._total:
            raise ScoreError(
                f"no group of two scored responses is left, {self.dropped_groups} were dropped; the first failures: "
                + "; ".join(self._env.guard.failures()[1].values())
            )
        if self._agents:
            start = time.perf_counter()
            groups = self._agents.play(self._env.next_prompts(count), group_size)
            self.sample_s += time.perf_counter() - start
        else:
            rows = reset_rows(self._env, self._policy, prompts=count, repeats=group_size)
            rollouts, sample_s = play_all(self._env, self._policy, rows)
            self.sample_s += sample_s
            by_prompt = [rollouts[at : at + group_size] for at in range(0, len(rollouts), group_size)]
            for group in by_prompt:
                note(self._env, group)
            groups = [group_of_rollouts(group) for group in by_prompt]
        self.collected += len(groups) * group_size
        kept = [group for group in groups if group]
        self.dropped_groups += len(groups) - len(kept)
        return kept
