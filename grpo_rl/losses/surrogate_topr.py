"""TOPR: good responses are imitated, bad ones weigh less as they become less likely."""

from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_rl.losses.factors import SURROGATE


@SURROGATE.add("topr", "no ratio for good responses, at most 1 for bad ones")
def topr_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    log_prob: Float[Tensor, " N"],
    taper_high: Annotated[float, Field(description="largest weight where the advantage is negative", gt=0)] = 1.0,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-A \log\pi_\theta$ where $A > 0$, else $-\mathrm{sg}(\min(r, taper\_high))\, A \log\pi_\theta$.

    Source: TOPR, https://arxiv.org/abs/2503.14286, eq. 8. Its ratio is the product over the response; with
    ``loss.ratio=sequence`` the geometric mean takes its place, which does not vanish with the length.

    Args:
        log_ratio: log pi_theta - log pi_old, as `loss.ratio` says.
        advantage: of the token's response.
        log_prob: log pi_theta of the token, through which the gradient flows.

    A ratio of 2 counts as 1, one of 1/2 counts, and with a positive advantage there is none:

    >>> log_prob = torch.full((3,), -1.0)
    >>> topr_surrogate(torch.tensor([2.0, 0.5, 2.0]).log(), torch.tensor([-1.0, -1.0, 1.0]), log_prob)
    tensor([-1.0000, -0.5000,  1.0000])
    """
    weight = torch.where(advantage > 0, 1.0, log_ratio.detach().exp().clamp(max=taper_high))
    return -weight * advantage * log_prob
