"""Estimators of the KL divergence from a frozen reference, one value a sampled token. Letter: N tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def k3(log_prob: Float[Tensor, " N"], ref_log_prob: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    r"""KL estimate per token, in nats: $e^d - d - 1$ with $d = \log\pi_{ref} - \log\pi_\theta$; never negative.

    Over tokens sampled from pi_theta its mean is KL(pi_theta || pi_ref), with less variance than the mean of -d.
    Source: Schulman, http://joschu.net/blog/kl-approx.html; DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 4.

    Nothing is clamped. verl holds d within 20 and the estimate within 10, which takes the gradient away above d = 2.6,
    from the very tokens that have drifted furthest from the reference; a bound on d only matters above d = 88, where
    fp32 overflows to infinity, and such a step should be seen and skipped, not trained on in part.

    Args:
        log_prob: under the policy, with gradient.
        ref_log_prob: under the reference.

    The reference gives the token twice, once and half the policy's probability; 2 - ln 2 - 1 = 0.3069:

    >>> k3(torch.zeros(3), torch.tensor([2.0, 1.0, 0.5]).log())
    tensor([0.3069, 0.0000, 0.1931])
    """
    difference = ref_log_prob - log_prob
    # exp(d) - 1 loses all its digits in fp32 when d is below 1e-7, and fresh policies start there.
    return torch.expm1(difference) - difference
