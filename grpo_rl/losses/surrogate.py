"""Surrogates: what a token's probability ratio and advantage cost. Letter: N tokens."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_rl.losses.aggregate import sum_of_answer

Surrogate = Literal["clipped", "cispo", "sapo", "plain"]
"""What ``loss.surrogate`` may be."""
Ratio = Literal["token", "sequence", "sequence_token"]
"""Whose ratio a token's is, ``loss.ratio``."""


def leveled_log_ratio(
    log_ratio: Float[Tensor, " N"], level: Ratio, trainable: Bool[Tensor, " N"], answer: Int[Tensor, " N"] | None
) -> Float[Tensor, " N"]:
    r"""Log-ratio that the surrogate sees at each token.

    - ``token``: its own.
    - ``sequence``: the mean over its answer's trained tokens, so that the ratio is their geometric mean: GSPO,
      https://arxiv.org/abs/2507.18071, eq. 7. Every token of the answer has a part in its gradient.
    - ``sequence_token``: the same value, but each token has its own gradient, so that tokens of one answer may have
      different advantages: GSPO-token, eq. 14.

    Args:
        log_ratio: log pi_theta - log pi_old of each token, 0 where it is not trained.
        answer: number of each token's answer; not read for ``token``.

    Ratios of 4 and 1 in one answer, 1/2 in another:

    >>> log_ratio, trainable = torch.tensor([4.0, 1.0, 0.5]).log(), torch.tensor([True, True, True])
    >>> leveled_log_ratio(log_ratio, "sequence", trainable, torch.tensor([0, 0, 1])).exp()
    tensor([2.0000, 2.0000, 0.5000])
    """
    if level == "token":
        return log_ratio
    assert answer is not None
    mean = sum_of_answer(log_ratio, answer) / sum_of_answer(trainable.to(log_ratio), answer).clamp(min=1)
    return mean if level == "sequence" else mean.detach() + log_ratio - log_ratio.detach()


def surrogate_loss(
    kind: Surrogate,
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    log_prob: Float[Tensor, " N"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Float[Tensor, " N"]:
    """Loss per token of the surrogate that is named, from the function below of that name.

    Args:
        log_ratio: from :func:`leveled_log_ratio`.
        log_prob: log pi_theta of the token itself, read by ``cispo``.
    """
    if kind == "cispo":
        return cispo_surrogate(log_ratio, advantage, log_prob, clip_low, clip_high)
    if kind == "sapo":
        return sapo_surrogate(log_ratio, advantage, tau_pos, tau_neg)
    if kind == "plain":
        return plain_surrogate(log_ratio, advantage)
    return clipped_surrogate(log_ratio, advantage, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-\min(rA, \mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h)A)$, and at most $-cA$ for a bad answer.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 8; equal clips give GRPO. The dual clip is
    https://arxiv.org/abs/1912.09729, eq. 8 (verl's ``clip_ratio_c``, TRL's ``delta``).

    Args:
        log_ratio: log pi_theta - log pi_old of the sampled token, in nats.
        advantage: of the token's sequence.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: and above at 1 + clip_high.
        dual_clip: a bad answer's ratio counts up to this, and has no gradient beyond; None: however large.

    Raises:
        ValueError: a clip is out of range.

    A ratio of 1.5 on a good answer is paid as 1.2, so its gradient is zero; on a bad answer it is charged in full:

    >>> clipped_surrogate(torch.tensor([1.5, 1.5]).log(), torch.tensor([1.0, -1.0]))
    tensor([-1.2000,  1.5000])
    >>> clipped_surrogate(torch.tensor([1.5, 5.0]).log(), torch.tensor([-1.0, -1.0]), dual_clip=3.0)
    tensor([1.5000, 3.0000])
    """
    check_clips(clip_low, clip_high, dual_clip)
    # Past the upper clip a good answer's ratio no longer counts, but an overflow of it would: infinity times a zero
    # gradient is NaN. The cap sits one nat above the clip, so that nothing it touches has a value or a gradient. A bad
    # answer's ratio counts however large, unless the dual clip says otherwise, and must not be capped.
    capped = log_ratio.clamp(max=math.log1p(clip_high) + 1)
    charged = log_ratio if dual_clip is None else log_ratio.clamp(max=math.log(dual_clip))
    ratio = torch.where(advantage < 0, charged, capped).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def cispo_surrogate(
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    log_prob: Float[Tensor, " N"],
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-\mathrm{sg}(\mathrm{clip}(r, 1-\epsilon_l, 1+\epsilon_h))\, A \log\pi_\theta$.

    The weight is clipped, and no token's gradient is lost: a rare token that became likely keeps teaching.
    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5; ``sg`` takes no gradient.

    Args:
        log_ratio: whose weight is clipped.
        advantage: of the token's sequence.
        log_prob: log pi_theta of the token, through which the gradient flows.
        clip_low: the weight is at least 1 - clip_low; 1 is no bound.
        clip_high: and at most 1 + clip_high. TRL's ``epsilon_high`` is the bound itself: its 5 is a 4 here.

    A ratio of 10 weighs 5, and the gradient is -5:

    >>> log_prob = torch.tensor([-1.0], requires_grad=True)
    >>> cispo_surrogate(torch.tensor([10.0]).log(), torch.tensor([1.0]), log_prob).backward()
    >>> log_prob.grad
    tensor([-5.])
    """
    check_clips(clip_low, clip_high)
    return -log_ratio.detach().exp().clamp(1 - clip_low, 1 + clip_high) * advantage * log_prob


def sapo_surrogate(
    log_ratio: Float[Tensor, " N"], advantage: Float[Tensor, " N"], tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Float[Tensor, " N"]:
    r"""Loss per token: $-\frac{4}{\tau}\sigma(\tau(r-1))A$, whose gradient fades as the ratio leaves 1.

    Its gradient by the ratio is $-4\sigma(1-\sigma)A$: that of the unclipped surrogate at a ratio of 1. The larger
    temperature of bad answers lets theirs fade faster. Source: SAPO, https://arxiv.org/abs/2511.20347.

    Args:
        log_ratio: log pi_theta - log pi_old.
        advantage: of the token's sequence.
        tau_pos: temperature where the advantage is positive.
        tau_neg: and where it is not.

    >>> sapo_surrogate(torch.zeros(1), torch.ones(1))
    tensor([-2.])
    """
    tau = torch.where(advantage > 0, log_ratio.new_tensor(tau_pos), log_ratio.new_tensor(tau_neg))
    # Where the sigmoid has rounded to 1, and its gradient to 0, a ratio that overflows would turn that 0 into NaN.
    ratio = torch.minimum(log_ratio, torch.log1p(50 / tau)).exp()
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage


def plain_surrogate(log_ratio: Float[Tensor, " N"], advantage: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    r"""Loss per token: $-rA$, the policy gradient weighted by importance, with nothing clipped.

    On fresh weights the ratio is 1 and the gradient that of REINFORCE, $-A\nabla\log\pi_\theta$.
    Source: RLOO, https://arxiv.org/abs/2402.14740, for the case without a clip.

    >>> plain_surrogate(torch.tensor([2.0]).log(), torch.tensor([1.0]))
    tensor([-2.])
    """
    # An answer without an advantage costs nothing, even where its ratio overflows.
    return -torch.where(advantage == 0, 0.0, log_ratio).exp() * advantage


def clipped_tokens(
    kind: Surrogate,
    log_ratio: Float[Tensor, " N"],
    advantage: Float[Tensor, " N"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> dict[str, Bool[Tensor, " N"]]:
    """Tokens that a clip of the surrogate has changed: ``clip_low``, ``clip_high``, and with a dual one ``clip_dual``.

    ``clipped`` takes their gradient away, ``cispo`` only bounds their weight, ``sapo`` and ``plain`` have no clip.
    """
    low, high = log_ratio.exp() < 1 - clip_low, log_ratio.exp() > 1 + clip_high
    if kind == "clipped":
        low, high = low & (advantage < 0), high & (advantage > 0)
    elif kind != "cispo":
        low, high = torch.zeros_like(low), torch.zeros_like(high)
    flags = {"clip_low": low, "clip_high": high}
    if kind == "clipped" and dual_clip is not None:
        flags["clip_dual"] = (log_ratio.exp() > dual_clip) & (advantage < 0)
    return flags


def check_clips(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Refuses clips that are no bounds around a ratio of 1.

    Raises:
        ValueError: which, and what it may be.
    """
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(
            f"loss.clip_low is {clip_low} and loss.clip_high {clip_high}; need clip_low in [0, 1], clip_high >= 0"
        )
    if dual_clip is not None and not dual_clip >= 1 + clip_high:
        raise ValueError(
            f"loss.dual_clip is {dual_clip}; it bounds a bad answer's ratio beyond 1 + loss.clip_high, use at least "
            f"{1 + clip_high} (3 is usual), or null"
        )
