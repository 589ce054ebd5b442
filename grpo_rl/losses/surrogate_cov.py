"""Clip-Cov and KL-Cov: restraint on the tokens that make the entropy collapse. Letter: N tokens."""

from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_rl.losses.factors import SURROGATE
from grpo_rl.losses.surrogate import ClipHigh, ClipLow, clipped_surrogate, plain_surrogate, without_gradient


@SURROGATE.add("clip_cov", "PPO's, and no gradient for some tokens of high covariance", clips=without_gradient)
def clip_cov_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    covariance_draw: Float[Tensor, " N"],
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    clip_cov_fraction: Annotated[float, Field(description="share of tokens without gradient", gt=0, le=1)] = 2e-4,
) -> Float[Tensor, " N"]:
    """Loss per token: PPO's; 0, without gradient, for tokens that are drawn among those of high covariance.

    Source: The Entropy Mechanism, https://arxiv.org/abs/2505.22617, eq. 11 and 12; verl's ``clip_cov``, which draws in
    each micro-batch by its own covariances, and none that PPO clips.

    Args:
        log_ratio: log pi_theta - log pi_old of the token.
        advantage: of the token's response.
        covariance_draw: share of the step's tokens that are drawn earlier; 1: not among the candidates.

    >>> clip_cov_surrogate(torch.zeros(3), torch.ones(3), torch.tensor([0.0, 0.5, 1.0]), clip_cov_fraction=0.5)
    tensor([-0., -1., -1.])
    """
    drawn = covariance_draw < clip_cov_fraction
    log_ratio, advantage = (torch.where(drawn, 0.0, values) for values in (log_ratio, advantage))
    return clipped_surrogate(log_ratio, advantage, clip_low, clip_high)


@SURROGATE.add("kl_cov", "r A, and a KL on the tokens of highest covariance", trains_all=("kl_cov_coef",))
def kl_cov_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    covariance_rank: Float[Tensor, " N"],
    kl_cov_fraction: Annotated[float, Field(description="share of the step's tokens under a KL", gt=0, le=1)] = 2e-4,
    kl_cov_coef: Annotated[float, Field(description="weight of the KL on these tokens", gt=0)] = 1.0,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-rA$, and $+\beta|\log r|$ for the share of the step's tokens of the highest covariance.

    Source: The Entropy Mechanism, https://arxiv.org/abs/2505.22617, eq. 13 and 14; verl's ``kl_cov``, whose share is of
    the micro-batch, and rounded down.

    Args:
        log_ratio: log pi_theta - log pi_old of the token; on fresh weights the KL has no gradient.
        advantage: of the token's response.
        covariance_rank: share of the step's tokens with a larger covariance.

    >>> kl_cov_surrogate(torch.tensor([2.0, 2.0]).log(), torch.ones(2), torch.tensor([0.0, 0.5]), kl_cov_fraction=0.5)
    tensor([-1.3069, -2.0000])
    """
    kl = torch.where(covariance_rank < kl_cov_fraction, log_ratio.abs(), 0.0)
    return plain_surrogate(log_ratio, advantage) + kl_cov_coef * kl
