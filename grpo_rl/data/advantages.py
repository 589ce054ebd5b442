"""Advantages: each answer's reward against its siblings'. Letters: G answers to one prompt, N groups of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.losses.kl import KL, REWARD_KL, kl_estimate

Kind = Literal["zscore", "no_std", "leave_one_out", "batch_std", "batch_zscore", "multi_reward"]
"""What ``loss.advantage`` may be."""
OF_A_GROUP = ("zscore", "no_std", "leave_one_out")
"""Those that look at a group by itself; the others need all groups that were collected together."""

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL (verl adds 1e-6): near-equal rewards give small advantages."""


def group_advantages(rewards: Float[Tensor, "*N G"], kind: Kind = "zscore") -> Float[Tensor, "*N G"]:
    """Advantage of each answer; they sum to zero, and equal rewards give exact zeros.

    Args:
        rewards: of the answers to one prompt, or to each of several.
        kind: ``zscore`` is (r - mean) / (std + 1e-4) with the unbiased std: GRPO, https://arxiv.org/abs/2402.03300;
            ``no_std`` is r - mean: Dr. GRPO, https://arxiv.org/abs/2503.20783, for which dividing by the std weighs
            very easy and very hard prompts up; ``leave_one_out`` is r - mean of the other answers: RLOO,
            https://arxiv.org/abs/2402.14740.

    Raises:
        ValueError: fewer than two answers, a reward that is not finite, or a kind that is unknown or not of a group.

    One right answer of four: mean 1/4, deviations -1/4 and 3/4, variance (3/16 + 9/16) / 3 = 1/4:

    >>> rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    >>> group_advantages(rewards)
    tensor([-0.4999, -0.4999, -0.4999,  1.4997])
    >>> group_advantages(rewards, "leave_one_out")
    tensor([-0.3333, -0.3333, -0.3333,  1.0000])
    """
    size = rewards.shape[-1]
    if size < 2:
        raise ValueError(f"a group of {size} has no siblings to compare with; env.repeats must be at least 2")
    finite = rewards.isfinite().all(-1, keepdim=True)
    if not finite.all():
        raise ValueError(f"rewards must be finite, got {rewards[~finite.expand_as(rewards)][:size].tolist()}")
    if kind not in OF_A_GROUP:
        check_advantage(kind)
        raise ValueError(
            f"{kind} is of all groups of a collection, see batch_advantages; of one: {', '.join(OF_A_GROUP)}"
        )
    # Rounding of the mean would leave equal rewards a residue, which the z-score then magnifies up to 10,000 times.
    equal = (rewards == rewards[..., :1]).all(-1, keepdim=True)
    wide = rewards.double()  # the squares of large rewards overflow fp32, and a std of infinity would hide them all
    deviations = (wide - wide.mean(-1, keepdim=True)).masked_fill(equal, 0.0)
    if kind == "leave_one_out":
        # r_i - (sum - r_i) / (G - 1) = (r_i - mean) * G / (G - 1)
        deviations = deviations * (size / (size - 1))
    elif kind == "zscore":
        deviations = deviations / (wide.std(-1, keepdim=True) + STD_EPSILON)
    advantages = deviations.to(rewards.dtype)
    if not advantages.isfinite().all():
        raise ValueError(
            f"rewards as large as {rewards.abs().max():.3g} have advantages beyond {rewards.dtype}; scale them down "
            "(train.reward_scale)"
        )
    return advantages


def batch_advantages(
    rewards: Sequence[Float[Tensor, "N G"]],
    kind: Kind = "zscore",
    clip: float | None = None,
    parts: Sequence[Mapping[str, Float[Tensor, "N G"]]] = (),
    weights: Mapping[str, float] | None = None,
) -> list[Float[Tensor, "N G"]]:
    """Advantages of all groups that were collected together, in the layout of ``rewards``.

    Those of a group sum to zero, unless ``clip`` cuts some. Beside the kinds of :func:`group_advantages`:

    - ``batch_std``: (r - mean of the group) / (std of all rewards + 1e-4): Lite PPO, https://arxiv.org/abs/2508.08221;
      TRL's ``scale_rewards="batch"``.
    - ``batch_zscore``: (r - mean of the group) over the std of all these differences + 1e-4, so that prompts that are
      easier than others don't count as spread: REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262.
    - ``multi_reward``: the z-score in its group of each part of the reward, their weighted sum, over the std of all
      these sums + 1e-4, so that no part drowns in another's scale: GDPO, https://arxiv.org/abs/2601.05242; TRL's
      ``multi_objective_aggregation="normalize_then_sum"``.

    Both papers also subtract the mean of the whole batch, which is zero as each group's is.

    Args:
        rewards: a table for each size of group.
        clip: advantages are held within [-clip, clip].
        parts: of the rewards, a table by name for each of ``rewards``; read by ``multi_reward``.
        weights: of parts, 1 where none is given.

    Raises:
        ValueError: as :func:`group_advantages`, and for parts that are missing or weighed but unknown.

    Two groups whose rewards spread by 1 and by 3: the differences are ±0.5 and ±1.5, their variance 5/3.

    >>> batch_advantages([torch.tensor([[0.0, 1.0], [0.0, 3.0]])], "batch_zscore")
    [tensor([[-0.3873,  0.3873],
            [-1.1618,  1.1618]])]
    """
    check_advantage(kind, clip)
    if kind in OF_A_GROUP:
        advantages = [group_advantages(table, kind) for table in rewards]
    elif kind == "multi_reward":
        advantages = [_sum_of_parts(of_table, weights or {}) for of_table in parts]
        advantages = _over_std(advantages, advantages)
    else:
        advantages = [group_advantages(table, "no_std") for table in rewards]
        advantages = _over_std(advantages, rewards if kind == "batch_std" else advantages)
    return advantages if clip is None else [table.clamp(-clip, clip) for table in advantages]


def _sum_of_parts(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    if not parts or weights.keys() - parts.keys():
        raise ValueError(
            f"loss.advantage=multi_reward with loss.reward_weights {dict(weights)}, but the rewards have the parts "
            f"{sorted(parts)}; name these, or choose another loss.advantage"
        )
    return torch.stack([weights.get(name, 1.0) * group_advantages(table) for name, table in parts.items()]).sum(0)


def _over_std(tables: Sequence[Tensor], spread: Sequence[Tensor]) -> list[Tensor]:
    if not spread:
        return []
    std = torch.cat([table.flatten() for table in spread]).double().std()  # squares of large rewards overflow fp32
    return [table / (std + STD_EPSILON) for table in tables]


def kl_penalty(group: Group, kl: KL = "k1") -> Float[Tensor, " G"]:
    """KL from the reference that each answer is charged with, in nats: the estimates of its trained tokens, summed.

    Both log-probabilities are the trainer's, before the update: the sampler's would charge for the engine's rounding.
    Source: RLOO, https://arxiv.org/abs/2402.14740, section 2.1, with k1; as in PPO.

    Args:
        group: with ``old_log_probs`` and ``ref_log_probs``.
        kl: k1, k2 or k3.

    Raises:
        ValueError: log-probabilities are missing.

    >>> from dataclasses import replace
    >>> from grpo_rl.testing import random_group
    >>> group = replace(random_group(lengths=[1, 2]), old_log_probs=torch.tensor([-1.0, -1.0, -2.0]),
    ...                 ref_log_probs=torch.tensor([-3.0, -1.0, -1.5]))
    >>> kl_penalty(group)
    tensor([ 2.0000, -0.5000])
    """
    if group.old_log_probs is None or group.ref_log_probs is None:
        raise ValueError(
            f"group {group.group_id} lacks log-probabilities of the policy or the reference, which loss.kl_in=reward "
            "compares; write them with TrainPolicy.annotate and ReferencePolicy.annotate"
        )
    estimate = torch.where(group.trainable, kl_estimate(kl, group.old_log_probs, group.ref_log_probs), 0.0)
    return estimate.new_zeros(group.size).index_add(0, torch.repeat_interleave(group.lengths), estimate)


def check_advantage(kind: str, clip: float | None = None, kl_coef: float = 0.0, kl: str = "k1") -> None:
    """Refuses settings that give no advantage.

    Args:
        kl_coef: of the KL in the reward.

    Raises:
        ValueError: which one and what it may be.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"unknown advantage {kind!r}; choose one of {', '.join(get_args(Kind))}")
    if clip is not None and not clip > 0:
        raise ValueError(f"loss.advantage_clip is {clip}; use more than 0, or null")
    if kl_coef and kl not in REWARD_KL:
        raise ValueError(f"loss.kl={kl} differs by its gradient, and a reward has none; use {', '.join(REWARD_KL)}")
    if kl_coef and kind == "multi_reward":
        raise ValueError(
            "loss.advantage=multi_reward looks at parts of the reward, not at their sum; use loss.kl_in=loss"
        )
