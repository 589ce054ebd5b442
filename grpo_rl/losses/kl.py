"""Estimators of the KL divergence from a frozen reference, one value per sampled token. Letter: N tokens."""

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_rl.losses.factors import KL, call


def kl_estimate(
    kind: str,
    log_prob: Float[Tensor, " N"],
    ref_log_prob: Float[Tensor, " N"],
    log_ratio: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    r"""KL estimate per token, in nats, with $d = \log\pi_{ref} - \log\pi_\theta$ of the sampled token.

    Over tokens sampled from pi_theta, values and gradients have these means, where KL = KL(pi_theta || pi_ref):

    | kind  | per token                        | mean value | mean gradient         |
    |-------|----------------------------------|------------|-----------------------|
    | k1    | -d                               | KL         | 0                     |
    | k2    | d²/2                             | biased     | that of KL            |
    | k3    | e^d - d - 1                      | KL         | that of the reverse   |
    | k3+   | value of k3, gradient of k2      | KL         | that of KL            |
    | k3_is | ratio to the sampler times k3    | KL         | that of KL            |

    "The reverse" is KL(pi_ref || pi_theta). The means of ``k3_is`` also hold for tokens that were sampled from another
    policy than pi_theta; those of the others do not.

    Source: Schulman, http://joschu.net/blog/kl-approx.html (k1, k2, k3); Tang and Munos, https://arxiv.org/abs/2506.09477
    (gradients); ``k3+`` is verl's name; ``k3_is`` is DeepSeek-V3.2's, https://arxiv.org/abs/2512.02556.

    Args:
        log_prob: under the policy, with gradient.
        ref_log_prob: under the reference.
        log_ratio: log pi_theta - log of the policy that sampled, with gradient; read by ``k3_is``.

    The reference gives the token half the policy's probability; d = -ln 2, and d²/2 = 0.2402:

    >>> log_prob, ref = torch.zeros(1), torch.tensor([0.5]).log()
    >>> [round(kl_estimate(kind, log_prob, ref).item(), 4) for kind in ("k1", "k2", "k3")]
    [0.6931, 0.2402, 0.1931]
    """
    return call(KL.functions[kind], log_prob=log_prob, ref_log_prob=ref_log_prob, log_ratio=log_ratio)


@KL.add("k1", "only in the reward")
def k1(log_prob: Float[Tensor, " N"], ref_log_prob: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """KL estimate per token, in nats: the difference of the log-probabilities; see :func:`kl_estimate`."""
    return log_prob - ref_log_prob


@KL.add("k2")
def k2(log_prob: Float[Tensor, " N"], ref_log_prob: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """KL estimate per token, in nats: half the square of :func:`k1`."""
    return (log_prob - ref_log_prob).square() / 2


@KL.add("k3")
def k3(log_prob: Float[Tensor, " N"], ref_log_prob: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    r"""KL estimate per token, in nats: $e^d - d - 1$ with $d = \log\pi_{ref} - \log\pi_\theta$; never negative.

    Over tokens sampled from pi_theta its mean is KL(pi_theta || pi_ref), with less variance than the mean of -d.
    Source: Schulman, http://joschu.net/blog/kl-approx.html; DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 4.

    Nothing is clamped. verl clamps d to 20 and the estimate to 10, which removes the gradient above d = 2.6, from the
    very tokens that have drifted furthest from the reference. fp32 overflows only above d = 88, and such a step should
    be detected and skipped, not trained on in part.

    Args:
        log_prob: under the policy, with gradient.
        ref_log_prob: under the reference.

    Three tokens, to which the reference gives 2, 1 and 1/2 times the policy's probability; 2 - ln 2 - 1 = 0.3069:

    >>> k3(torch.zeros(3), torch.tensor([2.0, 1.0, 0.5]).log())
    tensor([0.3069, 0.0000, 0.1931])
    """
    difference = ref_log_prob - log_prob
    # exp(d) - 1 loses all its digits in fp32 when d is below 1e-7, and fresh policies start there.
    return torch.expm1(difference) - difference


@KL.add("k3+", "value of k3, gradient of k2")
def k3_plus(log_prob: Float[Tensor, " N"], ref_log_prob: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """KL estimate per token, in nats: the value of :func:`k3` with the gradient of :func:`k2`."""
    half_square = k2(log_prob, ref_log_prob)
    return half_square - half_square.detach() + k3(log_prob, ref_log_prob).detach()


@KL.add("k3_is", "k3 weighted by importance, unbiased off-policy too")
def k3_is(
    log_prob: Float[Tensor, " N"], ref_log_prob: Float[Tensor, " N"], log_ratio: Float[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """KL estimate per token, in nats: :func:`k3` times the ratio to the policy that sampled."""
    return log_ratio.exp() * k3(log_prob, ref_log_prob)


def over_full_vocabulary(teacher_kl: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Divergence per token, in nats, over the whole vocabulary: no estimate from the sampled token.

    `grpo_rl.policies.policy.TrainPolicy.score` computes it, as the kinds of `grpo_rl.policies.divergence`. Source: GKD,
    https://arxiv.org/abs/2306.13649.
    """
    return teacher_kl


for _name, _meaning in (
    ("reverse", "KL(policy to reference) over the full vocabulary"),
    ("forward", "KL(reference to policy) over the full vocabulary"),
    ("jensen_shannon", "the mean of both to their middle"),
):
    KL.add(_name, _meaning)(over_full_vocabulary)
