"""Importance weights that correct for the mismatch between sampler and trainer. Letter: N tokens."""

from collections.abc import Callable
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from grpo_rl.losses.aggregate import per_token, sum_over_response
from grpo_rl.losses.factors import CORRECTION, Level, call

High = Annotated[float, Field(description="high, the upper bound of rho", ge=0)]


@CORRECTION.add("none", "r = pi / pi_sampler, which also absorbs the mismatch")
def uncorrected(rho: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """1: the surrogate's own ratio is to the sampler, and contains both differences."""
    return torch.ones_like(rho)


@CORRECTION.add("truncate", "a weight min(rho, high)")
def truncate(rho: Float[Tensor, " N"], correction_high: High = 2.0) -> Float[Tensor, " N"]:
    r"""$\min(\rho, high)$: truncated importance sampling (TIS), https://fengyao.notion.site/off-policy-rl.

    Three tokens, to which the trainer gives 1/3, 1 and 3 times the sampler's probability:

    >>> truncate(torch.tensor([1 / 3, 1.0, 3.0]))
    tensor([0.3333, 1.0000, 2.0000])
    """
    return rho.clamp(max=correction_high)


@CORRECTION.add("mask", "rho, and 0 outside [low, high]")
def mask(
    rho: Float[Tensor, " N"],
    correction_low: Annotated[float, Field(description="low, the lower bound of rho", ge=0)] = 0.5,
    correction_high: High = 2.0,
) -> Float[Tensor, " N"]:
    """rho within [low, high], else 0, so tokens outside have no gradient.

    By token IcePop, https://ringtech.notion.site/icepop; by sequence masked importance sampling,
    https://richardli.xyz/rl-collapse.

    >>> mask(torch.tensor([1 / 3, 1.0, 3.0]))
    tensor([0., 1., 0.])
    """
    return rho.where((rho >= correction_low) & (rho <= correction_high), 0.0)


def correction_weight(
    log_ratio: Float[Tensor, " N"],
    how: str | Callable[..., Float[Tensor, " N"]],
    level: Level = "token",
    response: Int[Tensor, " N"] | None = None,
    trained: Float[Tensor, " N"] | None = None,
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    r"""Weight of each token in the surrogate loss, from $\rho = \pi_{old} / \pi_{sampler}$, and whether it is not rho.

    Weights carry no gradient. On fresh weights the two policies differ only by rounding, as trainer and engine compute
    in different ways; on stale weights they are different policies.

    With ``sequence``, rho is the product over the response's tokens: unbiased, with a far larger variance; with
    ``geometric`` their geometric mean (verl's ``geometric``): biased, with a variance that falls with the length.

    Args:
        log_ratio: log pi_old - log pi_sampler, 0 on tokens that are not trained.
        how: one of the functions above or its name, or one of the user's own, from rho.
        response: index of each token's response; read by ``sequence`` and ``geometric``.
        trained: 1 on tokens that are trained on, else 0; read by ``geometric``.
    """
    log_ratio = log_ratio.detach()
    if level != "token":
        log_ratio = sum_over_response(log_ratio, response)
    if level == "geometric":
        log_ratio = log_ratio / sum_over_response(trained, response).clamp(min=1)
    rho = log_ratio.exp()
    function = CORRECTION.function(how)
    weight = per_token(call(function, rho=rho), rho, function)
    return weight, weight != rho
