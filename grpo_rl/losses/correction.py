"""Importance weights that correct for the mismatch between sampler and trainer. Letter: N tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_rl.losses.aggregate import sum_over_response
from grpo_rl.losses.choices import Correction, Level


def correction_weight(
    log_ratio: Float[Tensor, " N"],
    how: Correction,
    level: Level = "token",
    low: float = 0.5,
    high: float = 2.0,
    response: Int[Tensor, " N"] | None = None,
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    r"""Weight of each token in the surrogate loss, $\rho = \pi_{old} / \pi_{sampler}$, and whether it reached a bound.

    Weights carry no gradient. On fresh weights the two policies differ only by rounding, as trainer and engine compute
    in different ways; on stale weights they are different policies.

    - ``none``: 1. The surrogate's own ratio is then to the sampler, and contains both differences.
    - ``truncate``: $\min(\rho, high)$: truncated importance sampling (TIS), https://fengyao.notion.site/off-policy-rl.
    - ``mask``: rho within [low, high], else 0, so tokens outside have no gradient: by token IcePop,
      https://ringtech.notion.site/icepop; by sequence masked importance sampling, https://richardli.xyz/rl-collapse.

    With ``sequence``, rho is the product over the response's tokens: unbiased, with a far larger variance.

    Args:
        log_ratio: log pi_old - log pi_sampler, 0 on tokens that are not trained.
        response: index of each token's response; read by ``sequence``.

    Three tokens, to which the trainer gives 1/3, 1 and 3 times the sampler's probability:

    >>> log_ratio = torch.tensor([1 / 3, 1.0, 3.0]).log()
    >>> correction_weight(log_ratio, "truncate")
    (tensor([0.3333, 1.0000, 2.0000]), tensor([False, False,  True]))
    >>> correction_weight(log_ratio, "mask")
    (tensor([0., 1., 0.]), tensor([ True, False,  True]))
    """
    log_ratio = log_ratio.detach()
    if how == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    rho = (log_ratio if level == "token" else sum_over_response(log_ratio, response)).exp()
    if how == "truncate":
        return rho.clamp(max=high), rho > high
    outside = ~((rho >= low) & (rho <= high))
    return rho.masked_fill(outside, 0.0), outside
