"""How prompts, responses, optimizer steps, micro-batches and devices fit together in a config: the plan, as data.

Nothing is loaded: lengths are assumed, everything else is counted by the functions that a run uses itself. What does
not divide is a `Misfit`, which the checks of a config raise and which `grpo-rl batches` draws.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from omegaconf import DictConfig

from grpo_rl.build.parts import annotates, group_sizes, micro_batching, optimizer_steps, total_steps
from grpo_rl.data.group import Group, micro_batches
from grpo_rl.settings.devices import Devices, allocate

Where = Literal["cut", "left_over", "micro_batches", "run"]
"""What a misfit breaks: a group, a collection, an optimizer step, the run."""

PROMPT_TOKENS = 128
"""Assumed length of a prompt where none is given: about that of a GSM8K question with its system prompt."""


class Misfit(ValueError):
    """A division of the config that does not come out.

    Args:
        what: does not fit, with the numbers.
        where: in the picture it shows.
        fits: nearest values that do, by key; each is a remedy by itself.

    >>> print(Misfit("16 in 3 halls", "cut", {"halls": [2, 4], "seats": [8]}))
    16 in 3 halls; use halls=2 or 4, or seats=8
    """

    def __init__(self, what: str, where: Where, fits: Mapping[str, Iterable[int]]) -> None:
        self.what, self.where = what, where
        self.fits = {key: tuple(values) for key, values in fits.items() if tuple(values)}
        super().__init__(f"{what}; use {self.remedy}")

    @property
    def remedy(self) -> str:
        """The values that fit, as a sentence's end."""
        return ", or ".join(f"{key}={' or '.join(map(str, values))}" for key, values in self.fits.items())


def misfits(cfg: DictConfig) -> list[Misfit]:
    """Every division of the config that does not come out; its numbers are 1 or more, and ``env.repeats`` 2 or more."""
    prompts, size, batch = cfg.env.num_envs, cfg.env.repeats, cfg.train.optim_batch_size
    collected, groups = prompts * size, max(1, batch // size)
    turns, steps = cfg.train.total_dialog_turns, cfg.train.gradient_accumulation_steps
    batches = [size * divisor for divisor in _divisors(prompts)]
    found = []
    if batch % size:
        sizes = [divisor for divisor in _divisors(batch) if divisor > 1 and prompts * divisor % batch == 0]
        found.append(
            Misfit(
                f"train.optim_batch_size={batch} is not a multiple of env.repeats={size}: a group would be cut",
                "cut",
                {"train.optim_batch_size": _nearest(batch, batches), "env.repeats": _nearest(size, sizes)},
            )
        )
    elif collected % batch:
        found.append(
            Misfit(
                f"env.num_envs x env.repeats = {prompts} x {size} = {collected} answers a collection do not divide "
                f"into batches of train.optim_batch_size={batch}",
                "left_over",
                {
                    "train.optim_batch_size": _nearest(batch, batches),
                    "env.num_envs": _nearest(prompts, [prompts // groups * groups, (prompts // groups + 1) * groups]),
                },
            )
        )
    if steps is not None and steps > groups:
        found.append(
            Misfit(
                f"train.gradient_accumulation_steps={steps} micro-batches cannot be made of the {groups} groups of an "
                "optimizer step",
                "micro_batches",
                {"train.gradient_accumulation_steps": [groups]},
            )
        )
    if turns < collected:
        found.append(
            Misfit(
                f"train.total_dialog_turns={turns} is less than one collection, {collected} answers",
                "run",
                {"train.total_dialog_turns": [collected]},
            )
        )
    return found


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of a run's batches.

    Args:
        prompts: prompts of a collection, each with ``group_size`` responses: a group.
        sizes: pairs of a collection, from 1, and the group size from it on.
        max_resamples: how often a collection may be filled up, which makes the collections fewer.
        batch_responses: responses of an optimizer step.
        epochs: passes over each collection.
        collections: collections of the whole run.
        optimizer_steps: optimizer steps of the whole run.
        wanted: responses that the config asks for; whole collections may give more.
        prompt_tokens: assumed length of every prompt.
        response_tokens: assumed length of every response.
        max_tokens: limit of a micro-batch, where the number of micro-batches is not given.
        accumulation: the number of micro-batches that is asked for; None: as many as the tokens need.
        micro_batches: how many groups each micro-batch of an optimizer step has.
        has_reference: a frozen reference scores every collection.
        needs_old_log_probs: the policy scores every collection before it trains on it.
        skips_zero_variance: zero-variance groups are not computed.
        devices: the devices of each role.
        misfits: what does not divide.
    """

    prompts: int
    group_size: int
    sizes: tuple[tuple[int, int], ...]
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
    misfits: tuple[Misfit, ...] = ()

    @property
    def responses(self) -> int:
        """Responses of a collection."""
        return self.prompts * self.group_size

    @property
    def all_responses(self) -> int:
        """Responses of all collections, each of its own group size."""
        starts = itertools.pairwise([*self.sizes, (self.collections + 1, 0)])
        return self.prompts * sum(size * (end - start) for (start, size), (end, _) in starts)

    @property
    def largest(self) -> int:
        """The largest group size of the run."""
        return max(size for _, size in self.sizes)

    @property
    def batch_groups(self) -> int:
        """Groups of an optimizer step."""
        return self.batch_responses // self.group_size

    @property
    def batches(self) -> int:
        """Whole optimizer steps of a collection, in one epoch."""
        return self.responses // self.batch_responses

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
        """Tokens computed for a group: its prompt once, then every response."""
        return self.tokens_of(self.group_size)

    def tokens_of(self, size: int) -> int:
        """Tokens computed for a group of so many responses."""
        return self.prompt_tokens + size * self.response_tokens

    def batch_of(self, group: int, response: int) -> int | None:
        """Which of the collection's optimizer steps takes this response; None: it is left over."""
        batch = (group * self.group_size + response) // self.batch_responses
        return batch if batch < self.batches else None

    def misfit(self, *where: Where) -> Misfit | None:
        """The misfit in one of these places."""
        return next((misfit for misfit in self.misfits if misfit.where in where), None)


def plan_batches(
    cfg: DictConfig, prompt_tokens: int | None = None, response_tokens: int | None = None, gpus: int | None = None
) -> BatchPlan:
    """The plan of a config, whether or not it divides.

    Args:
        prompt_tokens: assumed length of every prompt; None: :data:`PROMPT_TOKENS`, or what the context leaves.
        response_tokens: assumed length of every response; None: ``sampling.max_new_tokens``, the longest of one turn.
        gpus: number of GPUs to plan for; None: those of this machine.

    Raises:
        ValueError: the lengths do not fit into the context, or the device plan not on the machine.
    """
    context = cfg.inference_model.max_model_len
    response = cfg.sampling.max_new_tokens if response_tokens is None else response_tokens
    prompt = min(PROMPT_TOKENS, context - response) if prompt_tokens is None else prompt_tokens
    if prompt < 1 or response < 1 or prompt + response > context:
        raise ValueError(
            f"a prompt of {prompt} tokens and a response of {response} do not fit into "
            f"inference_model.max_model_len={context}; each needs one token or more"
        )
    settings = micro_batching(cfg)
    groups = [assumed_group(prompt, response, cfg.env.repeats)] * (cfg.train.optim_batch_size // cfg.env.repeats)
    count = settings["count"] and min(settings["count"], len(groups))
    micro = micro_batches(groups, settings["max_tokens"], count) if groups else []
    sizes, collections = group_sizes(cfg), total_steps(cfg)
    starts = sorted({1, *(step for step, _ in cfg.train.repeats_schedule if step <= collections)})
    return BatchPlan(
        prompts=cfg.env.num_envs,
        group_size=cfg.env.repeats,
        sizes=tuple((start, sizes.at(start)) for start in starts),
        max_resamples=cfg.train.max_refills,
        batch_responses=cfg.train.optim_batch_size,
        epochs=cfg.train.epochs,
        collections=collections,
        optimizer_steps=optimizer_steps(cfg),
        wanted=cfg.train.total_dialog_turns,
        prompt_tokens=prompt,
        response_tokens=response,
        max_tokens=settings["max_tokens"],
        accumulation=settings["count"],
        micro_batches=tuple(len(groups) for groups in micro),
        has_reference=bool(cfg.policy.kl_coef),
        needs_old_log_probs=annotates(cfg),
        skips_zero_variance=settings["skip_zero_advantage"],
        devices=allocate(cfg, visible=gpus),
        misfits=tuple(misfits(cfg)),
    )


@functools.cache
def assumed_group(prompt: int, response: int, size: int, number: int = 0, reference: bool = False) -> Group:
    """A group of these lengths and of nothing else; one number stands for all its tokens.

    Args:
        number: what tells it from other groups, its prompt included.
        reference: the reference has scored it.
    """

    def tokens(dtype: torch.dtype) -> torch.Tensor:
        return torch.ones((), dtype=dtype).expand(size * response)

    return Group(
        group_id=number,
        row=number,
        prompt_ids=torch.full((prompt,), number),
        response_ids=tokens(torch.long),
        log_probs=tokens(torch.float32),
        versions=tokens(torch.long),
        trainable=tokens(torch.bool),
        offsets=torch.arange(size + 1) * response,
        rewards=torch.zeros(size),
        ref_log_probs=tokens(torch.float32) if reference else None,
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _nearest(number: int, fitting: Iterable[int]) -> list[int]:
    """The greatest of the fitting values below a number, and the least above it.

    >>> _nearest(20, [8, 16, 32, 64]), _nearest(5, [0, 3])
    ([16, 32], [3])
    """
    fitting = [value for value in fitting if value > 0]
    below, above = [value for value in fitting if value < number], [value for value in fitting if value > number]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
