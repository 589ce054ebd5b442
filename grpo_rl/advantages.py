"""Advantages of a group: each answer's reward against its siblings'. Letter: G answers to one prompt."""

from __future__ import annotations

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

Kind = Literal["zscore", "no_std", "leave_one_out"]

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
        ValueError: fewer than two answers, a reward that is not finite, or an unknown kind.

    One right answer of four: mean 1/4, deviations -1/4 and 3/4, variance (3/16 + 9/16) / 3 = 1/4:

    >>> import torch
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
    if kind not in get_args(Kind):
        raise ValueError(f"unknown advantage {kind!r}; choose one of {', '.join(get_args(Kind))}")
    # Rounding of the mean would leave equal rewards a residue, which the z-score then magnifies up to 10,000 times.
    equal = (rewards == rewards[..., :1]).all(-1, keepdim=True)
    deviations = (rewards - rewards.mean(-1, keepdim=True)).masked_fill(equal, 0.0)
    if kind == "no_std":
        return deviations
    if kind == "leave_one_out":
        # r_i - (sum - r_i) / (G - 1) = (r_i - mean) * G / (G - 1)
        return deviations * (size / (size - 1))
    return deviations / (rewards.std(-1, keepdim=True) + STD_EPSILON)
