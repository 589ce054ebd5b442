"""DPPO: a trust region in the probabilities of tokens, where PPO has one in their ratios. Letter: N tokens."""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from grpo_rl.losses.factors import SURROGATE

MoveLow = Annotated[float, Field(description="largest divergence (tv, or kl in nats) where the advantage is < 0", gt=0)]
MoveHigh = Annotated[float, Field(description="largest divergence where the advantage is > 0", gt=0)]
RatioCap = Annotated[float, Field(description="largest weight of a token", ge=1)]
SquaredCoef = Annotated[float, Field(description="weight of the squared log-ratio of all tokens", ge=0)]
OF_TOKENS = {"ratio": "token", "trains_all": ("squared_coef",)}


def total_variation(log_ratio: Float[Tensor, " N"], log_prob: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The total variation of the sampled token against all others: |p - p_old|."""
    return (log_prob.exp() - (log_prob - log_ratio).exp()).abs()


def binary_kl(log_ratio: Float[Tensor, " N"], log_prob: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """KL of the sampled token against all others, from the old policy to the new one, in nats."""
    old = log_prob - log_ratio
    rest, old_rest = (torch.log(-torch.expm1(each.clamp(max=-1e-7))) for each in (log_prob, old))
    return -old.exp() * log_ratio - torch.expm1(old) * (old_rest - rest)


def beyond(
    divergence: Callable[..., Tensor],
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    log_prob: Float[Tensor, " N"],
    move_low: float = 0.2,
    move_high: float = 0.2,
) -> dict[str, Bool[Tensor, " N"]]:
    """Flags of the tokens that the advantage would push further out of the trust region."""
    moved = divergence(log_ratio.detach(), log_prob.detach())
    return {
        "clip_low": (advantage < 0) & (log_ratio < 0) & (moved > move_low),
        "clip_high": (advantage > 0) & (log_ratio > 0) & (moved > move_high),
    }


beyond_tv, beyond_kl = partial(beyond, total_variation), partial(beyond, binary_kl)


def _loss(
    flags: dict[str, Tensor], log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, cap: float, squared_coef: float
) -> Tensor:
    weight = log_ratio.detach().clamp(max=math.log(cap)).exp()
    loss = -weight.masked_fill(flags["clip_low"] | flags["clip_high"], 0.0) * advantage * log_prob
    return loss + squared_coef * log_ratio.square() if squared_coef else loss  # 0 times a square that overflows is NaN


@SURROGATE.add("dppo_tv", "no gradient beyond a change of the token's probability", clips=beyond_tv, **OF_TOKENS)
def dppo_tv_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    log_prob: Float[Tensor, " N"],
    move_low: MoveLow = 0.2,
    move_high: MoveHigh = 0.2,
    ratio_cap: RatioCap = 20.0,
    squared_coef: SquaredCoef = 0.0,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-\mathrm{sg}(\min(r, cap))\, A \log\pi_\theta$ inside the region, plus $c \log^2 r$.

    A rare token leaves PPO's range of ratios by a negligible change of its probability, and a likely one stays inside
    while its probability moves by 0.2: the region here is in |p - p_old|. Tokens that the advantage would push further
    out of it have no gradient. Source: DPPO-Binary-TV, https://arxiv.org/abs/2602.04879; verl's ``dppo_tv``; the
    squared term is prime-rl's.

    Args:
        log_ratio: log pi_theta - log pi_old of the token.
        advantage: of the token's response.
        log_prob: log pi_theta of the token, through which the gradient flows.

    From 0.5 to 0.9 is too far with a positive advantage, from 1/8 to 1/4 is not, of weight 2:

    >>> log_prob, old = torch.tensor([0.9, 0.25]).log(), torch.tensor([0.5, 0.125]).log()
    >>> dppo_tv_surrogate(log_prob - old, torch.ones(2), log_prob)
    tensor([0.0000, 2.7726])
    """
    flags = beyond_tv(log_ratio, advantage, log_prob, move_low, move_high)
    return _loss(flags, log_ratio, advantage, log_prob, ratio_cap, squared_coef)


@SURROGATE.add("dppo_kl", "no gradient beyond a KL of the token against all others", clips=beyond_kl, **OF_TOKENS)
def dppo_kl_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    log_prob: Float[Tensor, " N"],
    move_low: MoveLow = 0.2,
    move_high: MoveHigh = 0.2,
    ratio_cap: RatioCap = 20.0,
    squared_coef: SquaredCoef = 0.0,
) -> Float[Tensor, " N"]:
    """Loss per token: that of :func:`dppo_tv_surrogate`, with a region in the KL of the token against all others.

    Source: DPPO-Binary-KL, https://arxiv.org/abs/2602.04879; verl's ``dppo_kl``.
    """
    flags = beyond_kl(log_ratio, advantage, log_prob, move_low, move_high)
    return _loss(flags, log_ratio, advantage, log_prob, ratio_cap, squared_coef)
