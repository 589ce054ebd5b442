"""SyncCollector: sample, then train, in turns; and an engine as a TorchRL policy."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase

from grpo_rl.collectors.multi_turn import begin, group_of_trajectories, judge, play
from grpo_rl.data import keys
from grpo_rl.data.group import Group
from grpo_rl.engines.base import Sampler, Samples, Sampling
from grpo_rl.envs.base import Failure, LLMEnv, Prompt, Reward, ScoreError


class SyncCollector:
    """Iterates collections: each a list of groups, one for each of the environment's ``num_envs`` prompts.

    An answer whose scorer failed is left out of its group, and a group of fewer than two answers out of the collection:
    nothing could be compared. Both are counted.

    With ``refills``, groups whose answers were all rewarded alike, which teach nothing, are left out as well, and
    others are sampled in their place: dynamic sampling, DAPO, https://arxiv.org/abs/2503.14476, section 3.2.

    Args:
        env: gives prompts and scores answers; ``env.repeats`` is the group size.
        engine: samples.
        sampling: how; of each turn, where the task replies.
        total_dialog_turns: answers to sample in all, over all runs of a resumed training.
        collected: answers sampled before, when a run is resumed.
        refills: how often at most one collection is filled up; then it is filled with groups rewarded alike.
        alike: which groups teach nothing, :func:`rewarded_alike` unless rewards are changed before they are compared.

    Raises:
        ValueError: ``refills`` is negative.
    """

    def __init__(
        self,
        env: LLMEnv,
        engine: Sampler,
        sampling: Sampling,
        total_dialog_turns: int,
        collected: int = 0,
        refills: int = 0,
        alike: Callable[[Group], bool] | None = None,
    ) -> None:
        if refills < 0:
            raise ValueError(f"train.max_refills={refills}; it must be 0, which samples once, or more")
        self._env, self._engine, self._sampling = env, engine, sampling
        self._total, self._refills, self._alike = total_dialog_turns, refills, alike or rewarded_alike
        self.collected = collected
        self.repeats = env.repeats
        """Answers to each of the next prompts; it may change between collections."""
        self.sample_s = 0.0
        """Seconds that the engine took for the last collection."""
        self.dropped_groups = 0
        """Groups left out so far, as fewer than two of their answers had a reward."""
        self.filtered_groups = 0
        """Groups left out so far, as their answers were rewarded alike."""
        self.sampled: list[Group] = []
        """All groups of the last collection that had rewards, those left out as rewarded alike included."""

    def __iter__(self) -> Iterator[list[Group]]:
        while self.collected < self._total:
            yield self.collect()

    def collect(self) -> list[Group]:
        """A group for each of the next ``num_envs`` prompts, or of the ones after them where none is left of those.

        Raises:
            ScoreError: no group was left up to ``total_dialog_turns``.
        """
        wanted, refills = self._env.num_envs, 0
        groups: list[Group] = []
        self.sampled, self.sample_s = [], 0.0
        while not self.sampled or (len(groups) < wanted and refills < self._refills and self.collected < self._total):
            refills += bool(self.sampled)
            judged = self._sample(wanted - len(groups))
            self.sampled += judged
            groups += [group for group in judged if not self._alike(group)] if self._refills else judged
        # Groups compare by identity.
        groups += [group for group in self.sampled if group not in groups][: wanted - len(groups)]
        self.filtered_groups += len(self.sampled) - len(groups)
        return groups

    def state(self) -> dict[str, Any]:
        """Where the collection of the run stands, data position included, for a checkpoint."""
        return {"env": json.dumps(self._env.state_dict()), "left_out": [self.dropped_groups, self.filtered_groups]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`; how much was collected, the constructor was told."""
        self._env.load_state_dict(json.loads(state["env"]))
        self.dropped_groups, self.filtered_groups = state["left_out"]

    def metrics(self) -> dict[str, float]:
        """What was left out so far."""
        metrics: dict[str, float] = {"failed/groups": self.dropped_groups} if self.dropped_groups else {}
        if self._refills:
            metrics["sample/filtered_groups"] = self.filtered_groups
        return metrics

    def news(self) -> list[str]:
        """Nothing: what goes wrong here is raised."""
        return []

    def _sample(self, count: int) -> list[Group]:
        """The groups of the next ``count`` prompts, those of fewer than two scored answers left out and counted."""
        if self.dropped_groups and self.collected >= self._total:
            raise ScoreError(
                f"no group of two scored answers is left, {self.dropped_groups} were dropped; the first failures:\n"
                + "\n".join(self._env.guard.examples.values())
            )
        prompts = self._env.next_prompts(count)
        played = self._play(prompts) if self._env.max_turns > 1 else self._answer(prompts)
        groups = [group for judged in played if (group := rewarded(*judged))]
        self.collected += len(prompts) * self.repeats
        self.dropped_groups += len(prompts) - len(groups)
        return groups

    def _answer(self, prompts: Sequence[Prompt]) -> list[tuple[Group, list[Reward | Failure]]]:
        """A group of one turn for each prompt, and its rewards beside it."""
        start = time.perf_counter()
        samples = self._engine.generate([p.ids.tolist() for p in prompts], self.repeats, self._sampling)
        self.sample_s += time.perf_counter() - start
        return [
            (group_of_samples(prompt, sample), self._env.score(prompt.row, sample.responses))
            for prompt, sample in zip(prompts, samples, strict=True)
        ]

    def _play(self, prompts: Sequence[Prompt]) -> list[tuple[Group, list[Reward | Failure]]]:
        """A group of conversations about each prompt, and their rewards beside it."""
        start = time.perf_counter()
        env, repeats = self._env, self.repeats
        played = [
            [begin(env, env.task.rows[prompt.row], f"row {prompt.row}", prompt.ids.tolist()) for _ in range(repeats)]
            for prompt in prompts
        ]
        play(env, self._engine, self._sampling, [trajectory for group in played for trajectory in group])
        self.sample_s += time.perf_counter() - start
        return [
            (group_of_trajectories(prompt, group), judge(env, group))
            for prompt, group in zip(prompts, played, strict=True)
        ]


def group_of_samples(prompt: Prompt, samples: Samples) -> Group:
    """The answers to one prompt as a group, not yet rewarded."""
    return Group(
        group_id=prompt.group_id,
        row=prompt.row,
        prompt_ids=prompt.ids,
        response_ids=samples.response_ids,
        log_probs=samples.log_probs,
        versions=samples.versions,
        trainable=torch.ones_like(samples.response_ids, dtype=torch.bool),
        offsets=samples.offsets,
        rewards=torch.zeros(len(samples.offsets) - 1),
        truncated=samples.truncated,
    )


def rewarded(group: Group, results: Sequence[Reward | Failure]) -> Group | None:
    """The group with its rewards, without the answers that have none; None where fewer than two are left.

    >>> from grpo_rl.testing import random_group
    >>> right, wrong = Reward({"right": 1.0}), Reward({"right": 0.0})
    >>> group = rewarded(random_group(lengths=[1, 2, 3]), [right, Failure("timeout", "…"), wrong])
    >>> group.lengths.tolist(), group.rewards.tolist()
    ([1, 3], [1.0, 0.0])
    """
    rewards = [result for result in results if isinstance(result, Reward)]
    if len(rewards) < 2:
        return None
    if len(rewards) < group.size:
        group = group.with_only([g for g, result in enumerate(results) if isinstance(result, Reward)])
    measures = dict.fromkeys(name for reward in rewards for name in reward.measures)
    return group.with_rewards(
        _numbers(reward.total for reward in rewards),
        {name: _numbers(reward.parts[name] for reward in rewards) for name in rewards[0].parts},
        {name: _numbers(reward.measures.get(name, math.nan) for reward in rewards) for name in measures},
    )


def rewarded_alike(group: Group, clip: float = math.inf, by_part: bool = False) -> bool:
    """Whether all answers have the same reward, and so no advantage over each other.

    Args:
        clip: rewards are compared within plus and minus this.
        by_part: each part of the reward is compared, not their sum.
    """
    rewards = torch.stack(list(group.reward_parts.values())) if by_part else group.rewards.clamp(-clip, clip)[None]
    return bool((rewards == rewards[:, :1]).all())


def _numbers(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


class EnginePolicy(TensorDictModuleBase):
    """An engine as a TorchRL policy, for ``env.rollout`` and TorchRL's own collectors.

    Rows of one group share one prompt: they are sampled in one call, so the engine computes the prompt once.
    """

    in_keys = [keys.TOKENS_PROMPT, keys.GROUP_ID]  # pyright: ignore[reportAssignmentType]
    out_keys = [  # pyright: ignore[reportAssignmentType]
        keys.TOKENS_RESPONSE,
        keys.LOG_PROBS_RESPONSE,
        keys.VERSIONS,
        keys.TRUNCATED,
    ]

    def __init__(self, engine: Sampler, sampling: Sampling) -> None:
        super().__init__()
        self._engine, self._sampling = engine, sampling

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes an answer, its log-probabilities, policy version and truncation into each row."""
        rows = list(tensordict.unbind(0))
        groups: dict[int, list[TensorDictBase]] = {}
        for row in rows:
            groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)
        by_size: dict[int, list[list[TensorDictBase]]] = {}
        for group in groups.values():
            by_size.setdefault(len(group), []).append(group)
        for size, members in by_size.items():
            prompts = [group[0][keys.TOKENS_PROMPT].tolist() for group in members]
            for group, samples in zip(members, self._engine.generate(prompts, size, self._sampling), strict=True):
                self._write(group, samples)
        return lazy_stack(rows)

    @staticmethod
    def _write(group: list[TensorDictBase], samples: Samples) -> None:
        log_probs, versions = (x.split(samples.offsets.diff().tolist()) for x in (samples.log_probs, samples.versions))
        for g, (row, ids) in enumerate(zip(group, samples.responses, strict=True)):
            row[keys.TOKENS_RESPONSE] = ids
            row[keys.LOG_PROBS_RESPONSE] = log_probs[g]
            row[keys.VERSIONS] = versions[g]
            row[keys.TRUNCATED] = samples.truncated[g : g + 1]
