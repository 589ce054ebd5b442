"""Groups from samples and rewards, built the same way for every collector."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from grpo_rl.data.group import Group
from grpo_rl.engines.base import Samples
from grpo_rl.envs.base import Failure, Prompt, Reward


def group_of_samples(prompt: Prompt, samples: Samples) -> Group:
    """The responses to one prompt as a group, not yet rewarded.

    Raises:
        RuntimeError: none of the log-probabilities is a number. A few that are not are named when they are trained on.
    """
    if len(samples.log_probs) and not samples.log_probs.isfinite().any():
        raise RuntimeError(
            f"the engine sampled row {prompt.row} with log-probabilities none of which is a finite number: its model's "
            "arithmetic fails. Try inference_model.engine=transformers, or another dtype"
        )
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
        routes=samples.routes,
        prompt_routes=samples.prompt_routes,
        kept_ids=samples.kept_ids,
        kept_counts=samples.kept_counts,
    )


def rewarded(group: Group, results: Sequence[Reward | Failure]) -> Group | None:
    """The group with its rewards, without the responses that have none; None where fewer than two are left.

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
    return replace(
        group,
        rewards=_numbers(reward.total for reward in rewards),
        reward_parts=_by_name([reward.parts for reward in rewards]),
        measures=_by_name([reward.measures for reward in rewards]),
    )


def has_zero_variance(group: Group, clip: float = math.inf, by_part: bool = False) -> bool:
    """True if all responses have the same reward, and so no advantage over each other.

    Args:
        clip: rewards are compared within plus and minus this.
        by_part: each part of the reward is compared, not their sum.
    """
    rewards = torch.stack(list(group.reward_parts.values())) if by_part else group.rewards.clamp(-clip, clip)[None]
    # A response without a part differs in it from none.
    most, least = rewards.nan_to_num(-math.inf).amax(1), rewards.nan_to_num(math.inf).amin(1)
    return bool((most <= least).all())


def _by_name(numbers: Sequence[Mapping[str, float]]) -> dict[str, torch.Tensor]:
    """The named numbers of each response; NaN where it has none of a name."""
    names = dict.fromkeys(name for own in numbers for name in own)
    return {name: _numbers(own.get(name, math.nan) for own in numbers) for name in names}


def _numbers(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32)
