"""Aggregation of token losses into one number: a weight per token, so that the loss is sum(weight * loss).

Letters: N response tokens of a micro-batch, B responses of a micro-batch, P prompts (groups) of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_rl.losses.choices import Aggregation


@dataclass(frozen=True)
class StepTotals:
    """Counts over a whole optimizer step, with all its micro-batches and ranks.

    Dividing by a micro-batch's own counts would give the tokens of a short micro-batch more weight, and the gradient
    would depend on how the step was split.

    Args:
        sequences: responses, including those without a trained token: they add a loss of zero to a mean over
            responses, as in TRL, and as in verl's training (which passes the global batch size).
        tokens: trained tokens.
        prompts: groups.
        entropy_floor: tokens of lower entropy carry no policy gradient; None: every token does.
    """

    sequences: int
    tokens: int
    prompts: int
    entropy_floor: float | None = None


def token_weights(
    lengths: Int[Tensor, " B"],
    trainable: Bool[Tensor, " N"],
    how: Aggregation,
    totals: StepTotals,
    group_sizes: Int[Tensor, " P"] | None = None,
    normalizer: int | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " N"]:
    """Weight of each token in the loss of the whole optimizer step; 0 on tokens that are not trained on.

    - ``sequence_mean``, GRPO (https://arxiv.org/abs/2402.03300, eq. 3): the mean over a response's trained tokens, then
      over responses.
    - ``token_mean``, DAPO (https://arxiv.org/abs/2503.14476, eq. 8): every trained token has the same weight.
    - ``constant``, Dr. GRPO (https://arxiv.org/abs/2503.20783): the sum over a response's tokens, divided
      by a constant, then the mean over responses; the weight of a token does not depend on the response's length.
    - ``prompt_mean``, ScaleRL (https://arxiv.org/abs/2510.13786): the mean over the trained tokens of all responses to
      a prompt, then over prompts.

    Args:
        lengths: tokens of each response; N in all.
        trainable: False on tokens that are not trained on, such as a tool's output.
        totals: counts of the whole step.
        group_sizes: responses of each prompt, in the order of ``lengths``; B in all. Read by ``prompt_mean``.
        normalizer: the constant of ``constant``, such as the largest response length.
        dtype: of the weights.

    Raises:
        ValueError: unknown ``how``, lengths or sizes that don't add up, a normalizer that is missing or not positive,
            or totals smaller than what this micro-batch holds.

    Two responses of one and three tokens to one prompt, the second with a tool's token inside:

    >>> lengths, trainable = torch.tensor([1, 3]), torch.tensor([True, True, False, True])
    >>> totals = StepTotals(sequences=2, tokens=3, prompts=1)
    >>> token_weights(lengths, trainable, "sequence_mean", totals)
    tensor([0.5000, 0.2500, 0.0000, 0.2500])
    >>> token_weights(lengths, trainable, "token_mean", totals)
    tensor([0.3333, 0.3333, 0.0000, 0.3333])
    >>> token_weights(lengths, trainable, "constant", totals, normalizer=10)
    tensor([0.0500, 0.0500, 0.0000, 0.0500])
    """
    if how not in get_args(Aggregation):
        raise ValueError(f"unknown aggregation {how!r}; choose one of {', '.join(get_args(Aggregation))}")
    if how == "constant" and not (normalizer and normalizer > 0):
        raise ValueError(f"loss.normalizer is {normalizer}; loss.aggregate=constant divides by it, use more than 0")
    if int(lengths.sum()) != len(trainable):
        raise ValueError(f"lengths add up to {int(lengths.sum())} tokens, but there are {len(trainable)}")
    weights = trainable.to(dtype)
    held = {"sequences": len(lengths), "tokens": int(trainable.sum())}
    if group_sizes is not None:
        held["prompts"] = len(group_sizes)
    for name, count in held.items():
        if count > getattr(totals, name):
            raise ValueError(
                f"this micro-batch holds {count} {name}, more than totals.{name}={getattr(totals, name)}; totals are "
                "of the whole optimizer step"
            )
    response = torch.repeat_interleave(lengths)
    # A mean over no trained token has only zeros to divide; the clamps keep it at zero.
    if how == "token_mean":
        return weights / max(totals.tokens, 1)
    if how == "constant":
        return weights / (totals.sequences * normalizer)
    if how == "sequence_mean":
        return weights / sum_over_response(weights, response).clamp(min=1) / totals.sequences
    if group_sizes is None or int(group_sizes.sum()) != len(lengths):
        raise ValueError(
            f"group_sizes {group_sizes} must say to which prompt each of the {len(lengths)} responses belongs"
        )
    prompt = torch.repeat_interleave(group_sizes)[response]
    return weights / sum_over_response(weights, prompt).clamp(min=1) / totals.prompts


def sum_over_response(values: Float[Tensor, " N"], response: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The sum of ``values`` over each token's response, at each token.

    Args:
        response: index of each token's response.

    >>> sum_over_response(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 1]))
    tensor([1., 6., 6.])
    """
    if not len(response):
        return values
    # One addend after the other: in fp32 a response of 200,000 tokens would lose all but three digits.
    sums = torch.zeros(int(response.max()) + 1, dtype=torch.float64, device=values.device)
    return sums.index_add(0, response, values.double())[response].to(values)
