"""Batch sizes that do not divide evenly, with the nearest values that do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from grpo_rl.settings.sections import Sections

Where = Literal["cut", "left_over", "micro_batches", "run"]
"""The part that the error breaks: a group, a collection, an optimizer step, the run."""


class IndivisibleBatchError(ValueError):
    """A batch size that does not divide evenly; ``fits`` has the nearest values that do, each a remedy.

    >>> print(IndivisibleBatchError("16 in 3 halls", "cut", {"halls": [2, 4], "seats": [8]}))
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


def indivisible_batches(settings: Sections) -> Iterator[IndivisibleBatchError]:
    """Every batch size of the settings that does not divide evenly."""
    train, prompts, size = settings.train, settings.env.num_envs, settings.env.repeats
    batch, turns, steps = train.optim_batch_size, train.total_dialog_turns, train.gradient_accumulation_steps
    collected, groups = prompts * size, max(1, batch // size)
    batches = [size * divisor for divisor in divisors(prompts)]
    if batch % size:
        sizes = [divisor for divisor in divisors(batch) if divisor > 1 and prompts * divisor % batch == 0]
        yield IndivisibleBatchError(
            f"train.optim_batch_size={batch} is not a multiple of env.repeats={size}: a group would be cut",
            "cut",
            {"train.optim_batch_size": _nearest(batch, batches), "env.repeats": _nearest(size, sizes)},
        )
    elif collected % batch:
        multiples = [prompts // groups * groups, (prompts // groups + 1) * groups]
        yield IndivisibleBatchError(
            f"env.num_envs x env.repeats = {prompts} x {size} = {collected} responses a collection do not divide "
            f"into batches of train.optim_batch_size={batch}",
            "left_over",
            {"train.optim_batch_size": _nearest(batch, batches), "env.num_envs": _nearest(prompts, multiples)},
        )
    if steps is not None and steps > groups:
        yield IndivisibleBatchError(
            f"train.gradient_accumulation_steps={steps} micro-batches cannot be made of the {groups} groups of an "
            "optimizer step",
            "micro_batches",
            {"train.gradient_accumulation_steps": [groups]},
        )
    if turns < collected:
        yield IndivisibleBatchError(
            f"train.total_dialog_turns={turns} is less than one collection, {collected} responses",
            "run",
            {"train.total_dialog_turns": [collected]},
        )


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order; above 1e12 only pairs with one up to 1e6, enough for a proposal.

    >>> divisors(12), divisors(16), len(divisors(2**62))
    ([1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16], 40)
    """
    lower = [divisor for divisor in range(1, min(math.isqrt(number), 1_000_000) + 1) if number % divisor == 0]
    return sorted({*lower, *(number // divisor for divisor in lower)})


def _nearest(number: int, fitting: Iterable[int]) -> list[int]:
    """The greatest of the fitting values below a number, and the least above it.

    >>> _nearest(20, [8, 16, 32, 64]), _nearest(5, [0, 3])
    ([16, 32], [3])
    """
    fitting = [value for value in fitting if value > 0]
    below, above = [value for value in fitting if value < number], [value for value in fitting if value > number]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]
