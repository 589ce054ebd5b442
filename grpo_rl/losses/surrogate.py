"""Clipped surrogates: what a token's probability ratio and advantage cost. Letter: N tokens."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def clipped_surrogate(
    log_ratio: Float[Tensor, " N"], advantage: Float[Tensor, " N"], clip_low: float = 0.2, clip_high: float = 0.2
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-\min(rA, \mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h)A)$.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 8; equal clips give GRPO.

    Args:
        log_ratio: log pi_theta - log pi_old of the sampled token, in nats.
        advantage: of the token's sequence.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: and above at 1 + clip_high.

    Raises:
        ValueError: a clip is negative, or clip_low is above 1.

    A ratio of 1.5 on a good answer is paid as 1.2, so its gradient is zero; on a bad answer it is charged in full:

    >>> clipped_surrogate(torch.tensor([1.5, 1.5]).log(), torch.tensor([1.0, -1.0]))
    tensor([-1.2000,  1.5000])
    """
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low is {clip_low} and clip_high {clip_high}; need clip_low in [0, 1], clip_high >= 0")
    # Past the upper clip a good answer's ratio no longer counts, but an overflow of it would: infinity times a zero
    # gradient is NaN. The cap sits one nat above the clip, so that nothing it touches has a value or a gradient. A bad
    # answer's ratio counts however large, and must not be capped.
    capped = log_ratio.clamp(max=math.log1p(clip_high) + 1)
    ratio = torch.where(advantage < 0, log_ratio, capped).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
