"""The batch plan of a config: how prompts, responses, optimizer steps, micro-batches and devices fit together.

Nothing is loaded: lengths are assumed, everything else is counted by the functions that a run uses itself. What does
not divide is an `IndivisibleBatchError`, which the checks of a config raise and which `grpo-rl batches` draws.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from grpo_rl.data.batching import micro_batches_of
from grpo_rl.data.group import Group
from grpo_rl.settings.derived import micro_batching, needs_old_log_probs, optimizer_steps, total_steps
from grpo_rl.settings.devices import Devices, allocate
from grpo_rl.settings.divisibility import IndivisibleBatchError, Where, indivisible_batches
from grpo_rl.settings.sections import Sections

PROMPT_TOKENS = 128
"""Assumed length of a prompt where none is given: about that of a GSM8K question with its system prompt."""


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of a run's batches.

    Args:
        prompts: prompts of a collection, each with ``group_size`` responses: a group.
        max_resamples: how often a collection may be filled up, which makes the collections fewer.
        wanted: responses that the config asks for; whole collections may give more.
        max_tokens: limit of a micro-batch, where the number of micro-batches is not given.
        accumulation: the number of micro-batches that is asked for; None: as many as the tokens need.
        micro_batches: how many groups each micro-batch of an optimizer step has.
    """

    prompts: int
    group_size: int
    max_resamples: int
    batch_responses: int
    epochs: int
    collections: int
    optimizer_steps: int
    wanted: int
    prompt_tokens: int
    response_tokens: int
    max_tokens: int
    accumulation: int | None
    micro_batches: tuple[int, ...]
    has_reference: bool
    needs_old_log_probs: bool
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
    def over_budget(self) -> bool:
        """True where a group, which is never split, takes more than ``train.micro_batch_tokens``."""
        return self.accumulation is None and self.group_tokens > self.max_tokens

    @property
    def group_tokens(self) -> int:
        """Tokens computed for a group: its prompt once, then every response."""
        return self.prompt_tokens + self.group_size * self.response_tokens

    def assumed_groups(self, count: int, reference: bool = False) -> list[Group]:
        """Stand-ins for so many groups of a collection, scored by a reference or not."""
        lengths = (self.prompt_tokens, self.response_tokens, self.group_size)
        return [assumed_group(*lengths, i, reference) for i in range(count)]

    def error_in(self, *where: Where) -> IndivisibleBatchError | None:
        """The first error in one of these places."""
        return next((error for error in self.errors if error.where in where), None)


def plan_batches(
    settings: Sections,
    prompt_tokens: int | None = None,
    response_tokens: int | None = None,
    gpus: int | None = None,
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
        raise ValueError(
            f"a prompt of {prompt} tokens and a response of {response} do not fit into "
            f"inference_model.max_model_len={context}; each needs one token or more"
        )
    batching = micro_batching(settings)
    size = settings.env.repeats
    count = settings.train.optim_batch_size // size
    groups = [assumed_group(prompt, response, size, i) for i in range(count)]
    micro, _ = micro_batches_of(None, groups, batching.max_tokens, batching.count)
    return BatchPlan(
        prompts=settings.env.num_envs,
        group_size=size,
        max_resamples=settings.train.max_resamples,
        batch_responses=settings.train.optim_batch_size,
        epochs=settings.train.epochs,
        collections=total_steps(settings),
        optimizer_steps=optimizer_steps(settings),
        wanted=settings.train.total_dialog_turns,
        prompt_tokens=prompt,
        response_tokens=response,
        max_tokens=batching.max_tokens,
        accumulation=batching.count,
        micro_batches=tuple(len(groups) for groups in micro),
        has_reference=bool(settings.policy.kl_coef),
        needs_old_log_probs=needs_old_log_probs(settings),
        skips_zero_variance=batching.skip_zero_advantage,
        devices=allocate(settings, visible=gpus),
        errors=tuple(indivisible_batches(settings)),
    )


@functools.cache
def assumed_group(prompt: int, response: int, size: int, number: int = 0, reference: bool = False) -> Group:
    """A group of these lengths and of nothing else; one number stands for all its tokens.

    Args:
        number: an id that distinguishes it from other groups, its prompt included.
        reference: the reference has scored it.
    """

    def tokens(dtype: torch.dtype) -> torch.Tensor:
        return torch.ones((), dtype=dtype).expand(size * response)

    return Group(
        group_id=number,
        row=number,
        prompt_ids=torch.full((prompt,), number + 1),
        response_ids=tokens(torch.long),
        log_probs=tokens(torch.float32),
        versions=tokens(torch.long),
        trainable=tokens(torch.bool),
        offsets=torch.arange(size + 1) * response,
        rewards=torch.zeros(size),
        ref_log_probs=tokens(torch.float32) if reference else None,
    )
