"""Aggregation of token losses into one number: a weight per token, so that the loss is sum(weight * loss).

Letters: N response tokens of a micro-batch, B responses of a micro-batch, P prompts (groups) of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int, Shaped
from pydantic import Field
from torch import Tensor

from grpo_rl.losses.covariance import Covariance
from grpo_rl.losses.factors import AGGREGATE, call, named


@dataclass(frozen=True)
class StepTotals:
    """Counts and thresholds over a whole optimizer step, with all its micro-batches and ranks.

    Dividing by a micro-batch's own counts would give the tokens of a short micro-batch more weight, and the gradient
    would depend on how the step was split.

    Args:
        sequences: responses, including those without a trained token: they add a loss of zero to a mean over
            responses, as in TRL, and as in verl's training (which passes the global batch size).
        tokens: trained tokens.
        prompts: groups.
        entropy_floor: tokens of lower entropy carry no policy gradient; None: every token does.
        covariance: of all trained tokens, where the surrogate chooses some by it.
    """

    sequences: int
    tokens: int
    prompts: int
    entropy_floor: float | None = None
    covariance: Covariance | None = None


@AGGREGATE.add("sequence_mean", "each response weighs the same")
def sequence_mean(trained: Float[Tensor, " N"], response: Int[Tensor, " N"], sequences: int) -> Float[Tensor, " N"]:
    """GRPO (https://arxiv.org/abs/2402.03300, eq. 3): the mean over a response's tokens, then over responses."""
    # A mean over no trained token has only zeros to divide; the clamps keep it at zero.
    return trained / sum_over_response(trained, response).clamp(min=1) / sequences


@AGGREGATE.add("token_mean", "each token")
def token_mean(trained: Float[Tensor, " N"], tokens: int) -> Float[Tensor, " N"]:
    """DAPO (https://arxiv.org/abs/2503.14476, eq. 8): every trained token has the same weight."""
    return trained / max(tokens, 1)


@AGGREGATE.add("prompt_mean", "each prompt")
def prompt_mean(trained: Float[Tensor, " N"], prompt: Int[Tensor, " N"], prompts: int) -> Float[Tensor, " N"]:
    """ScaleRL (https://arxiv.org/abs/2510.13786): the mean over tokens of a prompt's responses, then over prompts."""
    return trained / sum_over_response(trained, prompt).clamp(min=1) / prompts


@AGGREGATE.add("constant", "a response's sum over `normalizer`, then the mean over responses")
def constant(
    trained: Float[Tensor, " N"],
    sequences: int,
    normalizer: Annotated[
        float | None, Field(description="null: sampling.max_new_tokens, the most that one turn may have", gt=0)
    ] = None,
) -> Float[Tensor, " N"]:
    """Dr. GRPO (https://arxiv.org/abs/2503.20783): a response's sum over a constant, then the mean over responses.

    The weight of a token does not depend on the response's length.

    Raises:
        ValueError: the constant, such as the largest response length, is missing or not positive.
    """
    if not (normalizer and normalizer > 0):
        raise ValueError(f"loss.normalizer is {normalizer}; loss.aggregate=constant divides by it, use more than 0")
    return trained / (sequences * normalizer)


def token_weights(
    lengths: Int[Tensor, " B"],
    trainable: Bool[Tensor, " N"],
    how: str | Callable[..., Float[Tensor, " N"]],
    totals: StepTotals,
    group_sizes: Int[Tensor, " P"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " N"]:
    """Weight of each token in the loss of the whole optimizer step; 0 on tokens that are not trained on.

    Args:
        lengths: tokens of each response; N in all.
        trainable: False on tokens that are not trained on, such as a tool's output.
        how: one of the functions above or its name, or one of the user's own. Gets by name: ``trained``, ``trainable``
            as numbers; ``response`` and ``prompt``, each token's in this micro-batch; and ``sequences``, ``tokens`` and
            ``prompts`` of the whole step.
        group_sizes: responses of each prompt, in the order of ``lengths``; B in all.

    Raises:
        ValueError: lengths or sizes that don't add up, totals smaller than what this micro-batch holds, or not a weight
            per token.

    Two responses of one and three tokens to one prompt, the second with a tool's token inside:

    >>> lengths, trainable = torch.tensor([1, 3]), torch.tensor([True, True, False, True])
    >>> totals, sizes = StepTotals(sequences=2, tokens=3, prompts=1), torch.tensor([2])
    >>> token_weights(lengths, trainable, "sequence_mean", totals, sizes)
    tensor([0.5000, 0.2500, 0.0000, 0.2500])
    >>> token_weights(lengths, trainable, AGGREGATE.bound("constant", normalizer=10), totals, sizes)
    tensor([0.0500, 0.0500, 0.0000, 0.0500])
    """
    if int(lengths.sum()) != len(trainable):
        raise ValueError(f"lengths add up to {int(lengths.sum())} tokens, but there are {len(trainable)}")
    if int(group_sizes.sum()) != len(lengths):
        raise ValueError(f"group_sizes {group_sizes} must say to which prompt each of {len(lengths)} responses belongs")
    held = {"sequences": len(lengths), "tokens": int(trainable.sum()), "prompts": len(group_sizes)}
    for name, count in held.items():
        if count > getattr(totals, name):
            raise ValueError(
                f"this micro-batch holds {count} {name}, more than totals.{name}={getattr(totals, name)}; totals are "
                "of the whole optimizer step"
            )
    function, response = AGGREGATE.function(how), torch.repeat_interleave(lengths)
    weights = call(
        function,
        trained=trainable.to(dtype),
        response=response,
        prompt=torch.repeat_interleave(group_sizes)[response],
        sequences=totals.sequences,
        tokens=totals.tokens,
        prompts=totals.prompts,
    )
    return per_token(weights, trainable, function)


def per_token(values: object, tokens: Shaped[Tensor, " N"], function: Callable[..., object]) -> Tensor:
    """The values that a function has returned.

    Raises:
        ValueError: they are not one per token, and would be spread over all.
    """
    if not isinstance(values, Tensor) or values.shape != tokens.shape:
        got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"{values!r:.80}"
        raise ValueError(f"{named(function)} returned {got} for {len(tokens)} tokens; return a value per token")
    return values


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
