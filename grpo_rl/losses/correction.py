"""What makes up for a sampler that gave its tokens other probabilities than the trainer does. Letter: N tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_rl.losses.aggregate import sum_of_answer

Correction = Literal["none", "truncate", "mask"]
"""What ``loss.correction`` may be."""
Level = Literal["token", "sequence"]
"""Whose weight a token's is, ``loss.correction_level``."""


def correction_weight(
    log_ratio: Float[Tensor, " N"],
    how: Correction,
    level: Level = "token",
    low: float = 0.5,
    high: float = 2.0,
    answer: Int[Tensor, " N"] | None = None,
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    r"""Weights of tokens in the surrogate loss, $\rho = \pi_{old} / \pi_{sampler}$, and which met a bound; no gradient.

    Both had the same parameters, or should have had: the trainer computes them in one way and the engine in another,
    and where the engine's are stale they differ in earnest.

    - ``none``: 1. The surrogate's own ratio is then to the sampler, and holds everything that differs.
    - ``truncate``: $\min(\rho, high)$: truncated importance sampling (TIS), https://fengyao.notion.site/off-policy-rl.
    - ``mask``: rho within [low, high], else 0, so that what is outside teaches nothing: by token IcePop,
      https://ringtech.notion.site/icepop; by sequence masked importance sampling, https://richardli.xyz/rl-collapse.

    By ``sequence``, rho is the product over the answer's tokens: unbiased, and far more spread.

    Args:
        log_ratio: log pi_old - log pi_sampler, 0 on tokens that are not trained.
        answer: number of each token's answer; read by ``sequence``.

    Tokens that the trainer gives a third, the same and three times the sampler's probability:

    >>> log_ratio = torch.tensor([1 / 3, 1.0, 3.0]).log()
    >>> correction_weight(log_ratio, "truncate")
    (tensor([0.3333, 1.0000, 2.0000]), tensor([False, False,  True]))
    >>> correction_weight(log_ratio, "mask")
    (tensor([0., 1., 0.]), tensor([ True, False,  True]))
    """
    log_ratio = log_ratio.detach()
    if how == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    rho = (log_ratio if level == "token" else sum_of_answer(log_ratio, answer)).exp()
    if how == "truncate":
        return rho.clamp(max=high), rho > high
    outside = ~((rho >= low) & (rho <= high))
    return rho.masked_fill(outside, 0.0), outside


def check_correction(how: str, level: str, low: float, high: float) -> None:
    """Refuses a correction that can't be meant.

    Raises:
        ValueError: which setting, and what it may be.
    """
    if how not in get_args(Correction):
        raise ValueError(f"loss.correction is {how!r}; it can be {', '.join(get_args(Correction))}")
    if level not in get_args(Level):
        raise ValueError(f"loss.correction_level is {level!r}; it can be {', '.join(get_args(Level))}")
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"loss.correction_low is {low} and loss.correction_high {high}; a weight of 1 must lie between them"
        )
