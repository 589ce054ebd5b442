"""GMPO: the geometric mean of a response's clipped ratios. Letter: N tokens."""

from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from grpo_rl.losses.aggregate import sum_over_response
from grpo_rl.losses.factors import SURROGATE


def beyond_log_clip(
    log_ratio: Float[Tensor, " N"], advantage: Float[Tensor, " N"], log_clip: float = 0.4
) -> dict[str, Bool[Tensor, " N"]]:
    """Flags of the tokens whose log-ratio is clipped, so that the mean's gradient does not reach them."""
    return {
        "clip_low": (advantage < 0) & (log_ratio < -log_clip),
        "clip_high": (advantage > 0) & (log_ratio > log_clip),
    }


@SURROGATE.add("gmpo", "the geometric mean of a response's clipped r", clips=beyond_log_clip, ratio="token")
def gmpo_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    trained: Float[Tensor, " N"],
    response: Int[Tensor, " N"],
    log_clip: Annotated[float, Field(description="log r is clipped to plus and minus this", gt=0)] = 0.4,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-A \exp(\mathrm{mean}_t\, c_t)$, where $c_t$ is the token's log-ratio, clipped.

    PPO's minimum is taken of each token's log-ratio in [-log_clip, log_clip], before the mean, which one token's large
    ratio moves little. All tokens of a response have one value, which is also their mean (``sequence_mean``). Source:
    GMPO, https://arxiv.org/abs/2507.20673, eq. 4; verl's ``geo_mean``, which with a correction by token takes the
    geometric mean of these weights, too.

    Args:
        log_ratio: log pi_theta - log pi_old of each token, 0 on tokens that are not trained on.
        advantage: of the token's response.

    Ratios of 2 and 1 with a positive advantage: ln 2 is clipped to 0.4, and exp(0.2) = 1.2214.

    >>> gmpo_surrogate(torch.tensor([2.0, 1.0]).log(), torch.ones(2), torch.ones(2), torch.zeros(2).long())
    tensor([-1.2214, -1.2214])
    """
    clipped = log_ratio.clamp(-log_clip, log_clip)
    least = torch.where(advantage < 0, torch.maximum(log_ratio, clipped), torch.minimum(log_ratio, clipped)) * trained
    mean = sum_over_response(least, response) / sum_over_response(trained, response).clamp(min=1)
    return -advantage * mean.exp()
