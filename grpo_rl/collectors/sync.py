"""SyncCollector: sample, then train, in turns; and an engine as a TorchRL policy."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase

from grpo_rl import keys
from grpo_rl.engines.base import Engine, Samples, Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.rollout import Group


class SyncCollector:
    """Iterates collections: each a list of complete groups, one for each of the environment's ``num_envs`` prompts.

    Args:
        env: gives prompts and scores answers; ``env.repeats`` is the group size.
        engine: samples.
        sampling: how.
        total_dialog_turns: answers to sample in all, over all runs of a resumed training.
        collected: answers sampled before, when a run is resumed.
    """

    def __init__(
        self, env: LLMEnv, engine: Engine, sampling: Sampling, total_dialog_turns: int, collected: int = 0
    ) -> None:
        self._env, self._engine, self._sampling = env, engine, sampling
        self._total = total_dialog_turns
        self.collected = collected
        self.sample_s = 0.0
        """Seconds that the engine took for the last collection."""

    def __iter__(self) -> Iterator[list[Group]]:
        while self.collected < self._total:
            yield self.collect()

    def collect(self) -> list[Group]:
        """One group for each of the next ``num_envs`` prompts."""
        prompts = self._env.next_prompts()
        start = time.perf_counter()
        samples = self._engine.generate([p.ids.tolist() for p in prompts], self._env.repeats, self._sampling)
        self.sample_s = time.perf_counter() - start
        groups = []
        for prompt, sample in zip(prompts, samples, strict=True):
            rewards = self._env.score(prompt.row, sample.responses)
            groups.append(
                Group(
                    group_id=prompt.group_id,
                    row=prompt.row,
                    prompt_ids=prompt.ids,
                    response_ids=sample.response_ids,
                    log_probs=sample.log_probs,
                    versions=torch.full_like(sample.response_ids, sample.version),
                    trainable=torch.ones_like(sample.response_ids, dtype=torch.bool),
                    offsets=sample.offsets,
                    rewards=torch.tensor([reward.total for reward in rewards], dtype=torch.float32),
                    reward_parts={
                        name: torch.tensor([reward.parts[name] for reward in rewards], dtype=torch.float32)
                        for name in self._env.task.reward_parts
                    },
                    truncated=sample.truncated,
                )
            )
        self.collected += len(prompts) * self._env.repeats
        return groups


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

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
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
        log_probs = samples.log_probs.split(samples.offsets.diff().tolist())
        for g, (row, ids) in enumerate(zip(group, samples.responses, strict=True)):
            row[keys.TOKENS_RESPONSE] = ids
            row[keys.LOG_PROBS_RESPONSE] = log_probs[g]
            row[keys.VERSIONS] = torch.full_like(ids, samples.version)
            row[keys.TRUNCATED] = samples.truncated[g : g + 1]
