"""How the losses of single tokens become one number: a weight per token, so that the loss is sum(weight * loss).

Letters: N response tokens of a micro-batch, B answers of a micro-batch.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Aggregation = Literal["sequence_mean", "token_mean"]


def token_weights(
    lengths: Int[Tensor, " B"],
    trainable: Bool[Tensor, " N"],
    how: Aggregation,
    num_sequences: int,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " N"]:
    """Weight of each token in the loss of the whole optimizer step; 0 where the policy did not choose the token.

    Both counts are of the whole optimizer step, over all micro-batches and ranks. Dividing by this micro-batch's own
    counts would make a short micro-batch's tokens weigh more, and the gradient depend on how the step was split.

    ``sequence_mean`` is GRPO (https://arxiv.org/abs/2402.03300, eq. 3): the mean over an answer's trained tokens, then
    over answers. ``token_mean`` is DAPO (https://arxiv.org/abs/2503.14476, eq. 8): every trained token weighs the same.

    Args:
        lengths: tokens of each answer; N in all.
        trainable: False for tokens that the policy did not choose (a tool's reply).
        num_sequences: answers of the step, those without a trained token included: they add a loss of zero to the
            mean, as in TRL, and as in verl when it trains (it is given the global batch size).
        num_tokens: trained tokens of the step.
        dtype: of the weights.

    Raises:
        ValueError: unknown ``how``, lengths that don't add up, or counts smaller than what this micro-batch holds.

    Two answers of one and three tokens, and a tool's token inside the second, in a step of two answers:

    >>> trainable = torch.tensor([True, True, False, True])
    >>> token_weights(torch.tensor([1, 3]), trainable, "sequence_mean", num_sequences=2, num_tokens=3)
    tensor([0.5000, 0.2500, 0.0000, 0.2500])
    >>> token_weights(torch.tensor([1, 3]), trainable, "token_mean", num_sequences=2, num_tokens=3)
    tensor([0.3333, 0.3333, 0.0000, 0.3333])
    """
    if int(lengths.sum()) != len(trainable):
        raise ValueError(f"lengths add up to {int(lengths.sum())} tokens, but there are {len(trainable)}")
    weights = trainable.to(dtype)
    if how == "token_mean":
        trained = int(trainable.sum())
        if trained > num_tokens:
            raise ValueError(
                f"this micro-batch trains {trained} tokens, more than num_tokens={num_tokens}; "
                "num_tokens counts the whole optimizer step"
            )
        return weights / max(num_tokens, 1)
    if how == "sequence_mean":
        if len(lengths) > num_sequences:
            raise ValueError(
                f"this micro-batch holds {len(lengths)} answers, more than num_sequences={num_sequences}; "
                "num_sequences counts the whole optimizer step"
            )
        answer = torch.repeat_interleave(lengths)
        trained_of_answer = weights.new_zeros(len(lengths)).index_add_(0, answer, weights)
        # An answer without a trained token has only zeros to divide.
        return weights / trained_of_answer.clamp(min=1)[answer] / num_sequences
    raise ValueError(f"unknown aggregation {how!r}; choose one of {', '.join(get_args(Aggregation))}")
