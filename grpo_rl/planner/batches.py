"""How prompts, answers, optimizer steps, micro-batches and devices fit together in a config: the plan, as data.

Nothing is loaded: lengths are assumed, everything else is counted by the functions that a run uses itself. What does
not divide is a `Misfit`, which the checks of a config raise and which `grpo-rl batches` draws.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from grpo_rl.data.batching import micro_batches
from grpo_rl.data.group import Group
from grpo_rl.settings.derived import group_sizes, micro_batching, needs_old_log_probs, optimizer_steps, total_steps
from grpo_rl.settings.devices import Devices, allocate
from grpo_rl.settings.misfits import Misfit, Where, misfits
from grpo_rl.settings.sections import Sections

PROMPT_TOKENS = 128
"""Length of a prompt where none is given: of GSM8K's question with its system prompt, about."""


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of a run's batches.

    Args:
        prompts: of a collection, each with ``group_size`` answers: a group.
        sizes: pairs of a collection, from 1, and the group size from it on.
        refills: how often a collection may be filled up, which makes the collections fewer.
        batch_answers: answers of an optimizer step.
        epochs: passes over each collection.
        collections: of the whole run.
        optimizer_steps: of the whole run.
        turns: answers that the config asks for; whole collections may give more.
        prompt_tokens: assumed, of every prompt.
        answer_tokens: assumed, of every answer.
        max_tokens: of a micro-batch, where their number is not given.
        accumulation: the number of micro-batches that is asked for; None: as many as the tokens need.
        micro_batches: how many groups each micro-batch of an optimizer step has.
        has_reference: a frozen reference scores every collection.
        annotates: so does the policy, before it trains on it.
        skips_equal_rewards: groups whose answers are all rewarded alike are not computed.
        devices: of each role.
        misfits: what does not divide.
    """

    prompts: int
    group_size: int
    sizes: tuple[tuple[int, int], ...]
    refills: int
    batch_answers: int
    epochs: int
    collections: int
    optimizer_steps: int
    turns: int
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int
    accumulation: int | None
    micro_batches: tuple[int, ...]
    has_reference: bool
    annotates: bool
    skips_equal_rewards: bool
    devices: Devices
    misfits: tuple[Misfit, ...] = ()

    @property
    def answers(self) -> int:
        """Answers of a collection."""
        return self.prompts * self.group_size

    @property
    def all_answers(self) -> int:
        """Answers of all collections, each of its own group size."""
        starts = itertools.pairwise([*self.sizes, (self.collections + 1, 0)])
        return self.prompts * sum(size * (end - start) for (start, size), (end, _) in starts)

    @property
    def largest(self) -> int:
        """The largest group size of the run."""
        return max(size for _, size in self.sizes)

    @property
    def batch_groups(self) -> int:
        """Groups of an optimizer step."""
        return self.batch_answers // self.group_size

    @property
    def batches(self) -> int:
        """Whole optimizer steps of a collection, in one epoch."""
        return self.answers // self.batch_answers

    @property
    def loads(self) -> list[int]:
        """Tokens of each micro-batch of an optimizer step."""
        return [groups * self.group_tokens for groups in self.micro_batches]

    @property
    def over_budget(self) -> bool:
        """True where a group, which is never split, takes more than ``train.micro_batch_tokens``."""
        return self.accumulation is None and self.tokens_of(self.largest) > self.max_tokens

    @property
    def group_tokens(self) -> int:
        """Tokens computed for a group: its prompt once, then every answer."""
        return self.tokens_of(self.group_size)

    def tokens_of(self, size: int) -> int:
        """Tokens computed for a group of so many answers."""
        return self.prompt_tokens + size * self.answer_tokens

    def batch_of(self, group: int, answer: int) -> int | None:
        """Which of the collection's optimizer steps takes this answer; None: it is left over."""
        batch = (group * self.group_size + answer) // self.batch_answers
        return batch if batch < self.batches else None

    def misfit(self, *where: Where) -> Misfit | None:
        """What does not fit there."""
        return next((misfit for misfit in self.misfits if misfit.where in where), None)


def plan_batches(
    settings: Sections, prompt_tokens: int | None = None, answer_tokens: int | None = None, gpus: int | None = None
) -> BatchPlan:
    """The plan of settings, whether or not they divide.

    Args:
        prompt_tokens: assumed of every prompt; None: :data:`PROMPT_TOKENS`, or what the context leaves.
        answer_tokens: assumed of every answer; None: ``sampling.max_new_tokens``, the longest that one turn can be.
        gpus: to plan for; None: those of this machine.

    Raises:
        ValueError: the lengths do not fit into the context, or the device plan not on the machine.
    """
    context = settings.inference_model.max_model_len
    answer = settings.sampling.max_new_tokens if answer_tokens is None else answer_tokens
    prompt = min(PROMPT_TOKENS, context - answer) if prompt_tokens is None else prompt_tokens
    if prompt < 1 or answer < 1 or prompt + answer > context:
        raise ValueError(
            f"a prompt of {prompt} tokens and an answer of {answer} do not fit into "
            f"inference_model.max_model_len={context}; each needs one token or more"
        )
    batching = micro_batching(settings)
    size = settings.env.repeats
    groups = [_assumed_group(prompt, answer, size)] * (settings.train.optim_batch_size // size)
    count = batching.count and min(batching.count, len(groups))
    micro = micro_batches(groups, batching.max_tokens, count) if groups else []
    sizes, collections = group_sizes(settings), total_steps(settings)
    starts = sorted({1, *(step for step, _ in settings.train.repeats_schedule if step <= collections)})
    return BatchPlan(
        prompts=settings.env.num_envs,
        group_size=size,
        sizes=tuple((start, sizes.at(start)) for start in starts),
        refills=settings.train.max_refills,
        batch_answers=settings.train.optim_batch_size,
        epochs=settings.train.epochs,
        collections=collections,
        optimizer_steps=optimizer_steps(settings),
        turns=settings.train.total_dialog_turns,
        prompt_tokens=prompt,
        answer_tokens=answer,
        max_tokens=batching.max_tokens,
        accumulation=batching.count,
        micro_batches=tuple(len(groups) for groups in micro),
        has_reference=bool(settings.policy.kl_coef),
        annotates=needs_old_log_probs(settings),
        skips_equal_rewards=batching.skip_zero_advantage,
        devices=allocate(settings, visible=gpus),
        misfits=tuple(misfits(settings)),
    )


def _assumed_group(prompt: int, answer: int, size: int) -> Group:
    """A group of these lengths and of nothing else; one number stands for all its tokens."""

    def tokens(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((), dtype=dtype).expand(count)

    return Group(
        group_id=0,
        row=0,
        prompt_ids=tokens(prompt, torch.long),
        response_ids=tokens(size * answer, torch.long),
        log_probs=tokens(size * answer, torch.float32),
        versions=tokens(size * answer, torch.long),
        trainable=tokens(size * answer, torch.bool),
        offsets=torch.arange(size + 1) * answer,
        rewards=tokens(size, torch.float32),
    )
