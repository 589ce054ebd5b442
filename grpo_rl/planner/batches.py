"""The batch plan of a config: how prompts, responses, optimizer steps, micro-batches and devices fit together.

Nothing is loaded: lengths are assumed, everything else is counted by the functions that a run uses itself. What does
not divide is an `IndivisibleBatchError`, which the checks of a config raise and which `grpo-rl batches` draws.
"""

import math
from dataclasses import dataclass

from grpo_rl.settings.derived import (
    IndivisibleBatchError,
    indivisible_batches,
    micro_batching,
    optimizer_steps,
    total_steps,
)
from grpo_rl.settings.devices import Devices, allocate
from grpo_rl.settings.sections import Sections

PROMPT_TOKENS = 128
"""Assumed length of a prompt where none is given: about that of a GSM8K question with its system prompt."""


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of a run's batches.

    Args:
        prompts: prompts of a collection, each with ``group_size`` responses: a group.
        max_tokens: limit of a micro-batch, where the number of micro-batches is not given.
        accumulation: the number of micro-batches that is asked for; None: as many as the tokens need.
    """

    settings: Sections
    prompts: int
    group_size: int
    batch_responses: int
    epochs: int
    collections: int
    optimizer_steps: int
    prompt_tokens: int
    response_tokens: int
    max_tokens: int
    accumulation: int | None
    skips_zero_variance: bool
    devices: Devices
    errors: tuple[IndivisibleBatchError, ...] = ()

    @property
    def responses(self) -> int:
        """Responses of a collection."""
        return self.prompts * self.group_size

    @property
    def batch_groups(self) -> int:
        """Groups of an optimizer step."""
        return self.batch_responses // self.group_size

    @property
    def batches(self) -> int:
        """Whole optimizer steps of a collection, in one epoch."""
        return self.responses // self.batch_responses

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The number of groups in each micro-batch of an optimizer step."""
        return equal_micro_batches(self.batch_groups, self.group_tokens, self.max_tokens, self.accumulation)

    @property
    def over_budget(self) -> bool:
        """True where a group, which is never split, takes more than ``train.micro_batch_tokens``."""
        return self.accumulation is None and self.group_tokens > self.max_tokens

    @property
    def group_tokens(self) -> int:
        """Tokens computed for a group: its prompt once, then every response."""
        return self.prompt_tokens + self.group_size * self.response_tokens


def plan_batches(
    settings: Sections, prompt_tokens: int | None = None, response_tokens: int | None = None, gpus: int | None = None
) -> BatchPlan:
    """The plan of settings, whether or not they divide.

    Args:
        prompt_tokens: assumed length of every prompt; None: :data:`PROMPT_TOKENS`, or what the context leaves.
        response_tokens: assumed length of every response; None: ``sampling.max_new_tokens``, the longest of one turn.
        gpus: number of GPUs to plan for; None: those of this machine.

    Raises:
        ValueError: the lengths do not fit into the context, or the device plan not on the machine.
    """
    context = settings.inference_model.max_model_len
    response = settings.sampling.max_new_tokens if response_tokens is None else response_tokens
    prompt = min(PROMPT_TOKENS, context - response) if prompt_tokens is None else prompt_tokens
    if prompt < 1 or response < 1 or prompt + response > context:
        text = f"a prompt of {prompt} tokens and a response of {response} do not fit into inference_model.max_model_len"
        raise ValueError(f"{text}={context}; each needs one token or more")
    batching, size = micro_batching(settings), settings.env.repeats
    return BatchPlan(
        settings=settings,
        prompts=settings.env.num_envs,
        group_size=size,
        batch_responses=settings.train.optim_batch_size,
        epochs=settings.train.epochs,
        collections=total_steps(settings),
        optimizer_steps=optimizer_steps(settings),
        prompt_tokens=prompt,
        response_tokens=response,
        max_tokens=batching.max_tokens,
        accumulation=batching.count,
        skips_zero_variance=batching.skip_zero_advantage,
        devices=allocate(settings, visible=gpus),
        errors=tuple(indivisible_batches(settings)),
    )


def equal_micro_batches(groups: int, group_tokens: int, max_tokens: int, count: int | None = None) -> tuple[int, ...]:
    """The number of groups in each micro-batch where `grpo_rl.data.batching.micro_batches` splits groups of one size.

    ``count`` asks for as many micro-batches, as far as there are groups; None: as ``max_tokens`` needs.

    >>> equal_micro_batches(7, 100, max_tokens=250), equal_micro_batches(2, 300, max_tokens=250)
    ((2, 2, 2, 1), (1, 1))
    """
    if not groups:
        return ()
    number = min(count, groups) if count else math.ceil(groups / max(1, max_tokens // group_tokens))
    return tuple(groups // number + (i < groups % number) for i in range(number))
