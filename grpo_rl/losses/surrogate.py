"""Surrogate losses of a token's probability ratio and advantage. Letter: N tokens."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from grpo_rl.losses.aggregate import sum_over_response
from grpo_rl.losses.factors import SURROGATE, Ratio, call

ClipLow = Annotated[float, Field(description="r is clipped below at 1 - clip_low", ge=0, le=1)]
ClipHigh = Annotated[float, Field(description="r is clipped above at 1 + clip_high", ge=0)]


def leveled_log_ratio(
    log_ratio: Float[Tensor, " N"], level: Ratio, trainable: Bool[Tensor, " N"], response: Int[Tensor, " N"] | None
) -> Float[Tensor, " N"]:
    r"""Log-ratio that the surrogate uses at each token.

    - ``token``: the token's own.
    - ``sequence``: the mean over the response's trained tokens, so that the ratio is their geometric mean: GSPO,
      https://arxiv.org/abs/2507.18071, eq. 7. Its gradient reaches every token of the response.
    - ``sequence_token``: the same value, with the gradient of the token alone, so that tokens of one response may have
      different advantages: GSPO-token, eq. 14.

    Args:
        log_ratio: log pi_theta - log pi_old of each token, 0 on tokens that are not trained on.
        response: index of each token's response; not read by ``token``.

    Ratios of 4 and 1 in one response, 1/2 in another:

    >>> log_ratio, trainable = torch.tensor([4.0, 1.0, 0.5]).log(), torch.tensor([True, True, True])
    >>> leveled_log_ratio(log_ratio, "sequence", trainable, torch.tensor([0, 0, 1])).exp()
    tensor([2.0000, 2.0000, 0.5000])
    """
    if level == "token":
        return log_ratio
    assert response is not None
    mean = sum_over_response(log_ratio, response) / sum_over_response(trainable.to(log_ratio), response).clamp(min=1)
    return mean if level == "sequence" else mean.detach() + log_ratio - log_ratio.detach()


def near_sampler(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    trained: Float[Tensor, " N"],
    response: Int[Tensor, " N"],
    bound: float,
) -> Bool[Tensor, " N"]:
    """False on the tokens of responses with a negative advantage whose mean KL to the sampler is above ``bound``.

    Off-policy sequence masking, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1, and TRL's
    ``off_policy_mask_threshold``: a response that has become unlikely is not pushed down further.

    Args:
        log_ratio: log pi_theta - log pi_sampler, 0 on tokens that are not trained on.
        bound: in nats per token; the estimate is the mean of -log_ratio, k1.

    >>> log_ratio, advantage = torch.tensor([-1.0, -3.0, -1.0]), torch.tensor([-1.0, -1.0, 1.0])
    >>> near_sampler(log_ratio, advantage, torch.ones(3), torch.tensor([0, 0, 1]), bound=0.5)
    tensor([False, False,  True])
    """
    tokens = sum_over_response(trained, response).clamp(min=1)
    return (advantage >= 0) | (-sum_over_response(log_ratio.detach(), response) / tokens <= bound)


def outside(
    log_ratio: Float[Tensor, " N"], clip_low: float = 0.2, clip_high: float = 0.2
) -> dict[str, Bool[Tensor, " N"]]:
    """Flags of the ratios outside the clips: of ``cispo`` their weight is bounded."""
    ratio = log_ratio.exp()
    return {"clip_low": ratio < 1 - clip_low, "clip_high": ratio > 1 + clip_high}


def without_gradient(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> dict[str, Bool[Tensor, " N"]]:
    """Flags of the tokens whose gradient PPO's clips remove."""
    flags = outside(log_ratio, clip_low, clip_high)
    flags = {"clip_low": flags["clip_low"] & (advantage < 0), "clip_high": flags["clip_high"] & (advantage > 0)}
    return flags if dual_clip is None else flags | {"clip_dual": (log_ratio.exp() > dual_clip) & (advantage < 0)}


@SURROGATE.add("clipped", "PPO's", clips=without_gradient)
def clipped_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: Annotated[
        float | None, Field(description="for negative advantages, r is capped at this; null: no cap", ge=0)
    ] = None,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-\min(rA, \mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h)A)$, and at most $-cA$ if $A < 0$.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 8; equal clips give GRPO. The dual clip is
    https://arxiv.org/abs/1912.09729, eq. 8 (verl's ``clip_ratio_c``, TRL's ``delta``).

    Args:
        log_ratio: log pi_theta - log pi_old of the sampled token, in nats.
        advantage: of the token's sequence.
        dual_clip: bound c on the ratio of a negative advantage, without gradient beyond it; None: no bound.

    With a positive advantage a ratio of 1.5 counts as 1.2, without gradient; with a negative one it counts in full:

    >>> clipped_surrogate(torch.tensor([1.5, 1.5]).log(), torch.tensor([1.0, -1.0]))
    tensor([-1.2000,  1.5000])
    >>> clipped_surrogate(torch.tensor([1.5, 5.0]).log(), torch.tensor([-1.0, -1.0]), dual_clip=3.0)
    tensor([1.5000, 3.0000])
    """
    # With a positive advantage a ratio past the upper clip no longer counts, but its overflow would: infinity times a
    # zero gradient is NaN. The cap is one nat above the clip, where the loss is constant. With a negative advantage the
    # ratio counts however large, unless there is a dual clip, and must not be capped.
    capped = log_ratio.clamp(max=math.log1p(clip_high) + 1)
    bounded = log_ratio if dual_clip is None else log_ratio.clamp(max=math.log(dual_clip))
    ratio = torch.where(advantage < 0, bounded, capped).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


@SURROGATE.add("cispo", "a clipped weight, no gradient lost", clips=outside)
def cispo_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    log_prob: Float[Tensor, " N"],
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-\mathrm{sg}(\mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h))\, A \log\pi_\theta$.

    The weight is clipped, not the gradient: a rare token that became likely still contributes.
    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5; ``sg`` stops the gradient.

    Args:
        log_ratio: from :func:`leveled_log_ratio`.
        advantage: of the token's sequence.
        log_prob: log pi_theta of the token, through which the gradient flows.
        clip_low: the weight is at least 1 - clip_low; with 1 there is no lower bound.
        clip_high: and at most 1 + clip_high. TRL's ``epsilon_high`` is the bound itself: its 5 is a 4 here.

    A ratio of 10 is clipped to a weight of 5, and the gradient is -5:

    >>> log_prob = torch.tensor([-1.0], requires_grad=True)
    >>> cispo_surrogate(torch.tensor([10.0]).log(), torch.tensor([1.0]), log_prob, clip_high=4.0).backward()
    >>> log_prob.grad
    tensor([-5.])
    """
    return -log_ratio.detach().exp().clamp(1 - clip_low, 1 + clip_high) * advantage * log_prob


@SURROGATE.add("sapo", "a soft gate")
def sapo_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    tau_pos: Annotated[float, Field(description="temperature for positive advantages", gt=0)] = 1.0,
    tau_neg: Annotated[float, Field(description="temperature for other advantages", gt=0)] = 1.05,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-\frac{4}{\tau}\sigma(\tau(r-1))A$, whose gradient fades as the ratio leaves 1.

    Its derivative by the ratio is $-4\sigma(1-\sigma)A$: that of the unclipped surrogate at a ratio of 1. The larger
    temperature for negative advantages makes theirs fade faster. Source: SAPO, https://arxiv.org/abs/2511.20347.

    Args:
        log_ratio: log pi_theta - log pi_old.
        advantage: of the token's sequence.

    >>> sapo_surrogate(torch.zeros(1), torch.ones(1))
    tensor([-2.])
    """
    tau = torch.where(advantage > 0, log_ratio.new_tensor(tau_pos), log_ratio.new_tensor(tau_neg))
    # Where the sigmoid has rounded to 1, and its gradient to 0, a ratio that overflows would turn that 0 into NaN.
    ratio = torch.minimum(log_ratio, torch.log1p(50 / tau)).exp()
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage


@SURROGATE.add("plain", "r A")
def plain_surrogate(log_ratio: Float[Tensor, " N"], advantage: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    r"""Loss per token: $-rA$, the importance-weighted policy gradient, without a clip.

    On fresh weights the ratio is 1 and the gradient is that of REINFORCE, $-A\nabla\log\pi_\theta$.
    Source: RLOO, https://arxiv.org/abs/2402.14740, for the case without a clip.

    >>> plain_surrogate(torch.tensor([2.0]).log(), torch.tensor([1.0]))
    tensor([-2.])
    """
    # Without an advantage the loss is zero, even if the ratio overflows.
    return -torch.where(advantage == 0, 0.0, log_ratio).exp() * advantage


@SURROGATE.add("none", "only the KL")
def no_surrogate(log_prob: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """0: in distillation the KL to the teacher is the whole loss, and rewards are only logged."""
    return torch.zeros_like(log_prob)


def clipped_tokens(
    surrogate: str | Callable[..., Tensor], log_ratio: Float[Tensor, " N"], advantage: Float[Tensor, " N"], **clips: Any
) -> dict[str, Bool[Tensor, " N"]]:
    """Flags of the tokens that a clip has changed: ``clip_low``, ``clip_high``, and with a dual clip ``clip_dual``.

    They come from the function's attribute ``clips``; without one nothing is clipped, or it is not known.

    Args:
        clips: the surrogate's settings, and ``log_prob`` of the tokens.
    """
    flags = getattr(surrogate if callable(surrogate) else SURROGATE.function(surrogate), "clips", None)
    if flags is None:
        return dict.fromkeys(("clip_low", "clip_high"), torch.zeros_like(log_ratio, dtype=torch.bool))
    return call(flags, log_ratio=log_ratio, advantage=advantage, **clips)
