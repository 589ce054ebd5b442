"""What changes in the course of a run: the KL coefficient, the group size, and when the reference is renewed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

Refresh = Literal["never", "steps", "plateau", "average"]

MAX_KL_ERROR = 0.2
"""Relative error that one step answers to, as in Ziegler et al.: single steps are noisy."""


class AdaptiveKL:
    r"""The coefficient of the KL term, which holds the measured KL near a target.

    Each step multiplies it by $1 + K\,\mathrm{clip}(\mathrm{KL} / \mathrm{target} - 1, -0.2, 0.2)$.
    Source: Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2, where the KL is of whole answers; here it is
    the mean over tokens that the metric ``kl/ref`` logs.

    Args:
        coef: at the beginning.
        target: KL to the reference, in nats a token; None keeps the coefficient.
        gain: K.

    Raises:
        ValueError: there is a target and no coefficient to begin with, or a number is out of range.

    Twice the target counts as a fifth too much:

    >>> kl = AdaptiveKL(0.1, target=0.02, gain=0.5)
    >>> round(kl.update(0.04), 4), round(kl.update(0.018), 4)
    (0.11, 0.1045)
    """

    def __init__(self, coef: float, target: float | None = None, gain: float = 0.1) -> None:
        if target is not None and not (target > 0 and coef > 0):
            raise ValueError(
                f"policy.target_kl={target} with policy.kl_coef={coef}; both must be more than 0: the coefficient is "
                "what moves, from where it begins"
            )
        if not 0 < gain <= 1:
            raise ValueError(f"policy.kl_gain={gain}; it must be more than 0, and at most 1")
        self.coef, self._target, self._gain = coef, target, gain

    def update(self, kl: float) -> float:
        """The coefficient after a step whose KL to the reference was ``kl``; one that is not finite changes nothing."""
        if self._target is not None and math.isfinite(kl):
            error = max(-MAX_KL_ERROR, min(MAX_KL_ERROR, kl / self._target - 1))
            self.coef *= 1 + self._gain * error
        return self.coef


class GroupSizes:
    """The group size of each step.

    Args:
        first: at the beginning.
        changes: group size by the step (counted from 1) from which on it holds.

    Raises:
        ValueError: a step is not one, or a group has fewer than two answers.

    >>> sizes = GroupSizes(8, {3: 4})
    >>> [sizes.at(step) for step in (1, 2, 3, 4)], sizes.steps_for(100, prompts=4), sizes.largest
    ([8, 8, 4, 4], 5, 8)
    """

    def __init__(self, first: int, changes: Mapping[int, int] | None = None) -> None:
        self._changes = {1: first} | {int(step): size for step, size in sorted((changes or {}).items())}
        for step, size in self._changes.items():
            if step < 1 or size < 2:
                raise ValueError(
                    f"env.repeats_schedule has a group size of {size} from step {step} on; a step is 1 or more, and a "
                    "group has at least 2 answers"
                )

    @property
    def largest(self) -> int:
        """The largest of all."""
        return max(self._changes.values())

    def at(self, step: int) -> int:
        """The group size of a step, counted from 1."""
        return self._changes[max(start for start in self._changes if start <= step)]

    def steps_for(self, answers: int, prompts: int) -> int:
        """Steps of ``prompts`` groups that it takes to sample ``answers`` answers, the last of them whole."""
        starts = sorted(self._changes)
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            a_step = prompts * self._changes[start]
            needed = -(-answers // a_step)
            if end is None or needed <= end - start:
                return start - 1 + needed
            answers -= a_step * (end - start)
        raise AssertionError("the last size has no end")


class RefreshRule:
    """When the frozen reference becomes a copy of the policy.

    - ``never``: it stays what training began with.
    - ``steps``: every so many steps.
    - ``plateau``: when the mean reward of so many steps is no higher than that of as many before.
    - ``average``: after every step it moves a little towards the policy.

    Source: WARP, https://arxiv.org/abs/2406.16768, for a moving average as the reference; "multiple training loops" with the
    reference renewed, https://arxiv.org/abs/2402.03300, section 4.1.2.

    Args:
        when: one of these.
        steps: of ``steps`` and ``plateau``.

    Raises:
        ValueError: there is no such rule, or ``steps`` is less than 1.

    >>> rule = RefreshRule("plateau", steps=2)
    >>> [rule.is_due(reward) for reward in (0.1, 0.2, 0.5, 0.6, 0.5, 0.6, 0.6, 0.6, 0.6)]
    [False, False, False, False, False, True, False, False, False]
    """

    def __init__(self, when: Refresh = "never", steps: int = 100) -> None:
        if when not in get_args(Refresh):
            raise ValueError(f"ref_model.refresh={when}; choose one of {', '.join(get_args(Refresh))}")
        if steps < 1:
            raise ValueError(f"ref_model.refresh_steps={steps}; it must be 1 or more")
        self.when, self._steps = when, steps
        self._rewards: list[float] = []

    def is_due(self, reward: float) -> bool:
        """Takes the mean reward of a step; whether the reference is to be renewed behind it."""
        if self.when in ("never", "average"):
            return self.when == "average"
        # What was before a refresh is of another loss: both windows begin behind it.
        self._rewards.append(reward)
        due = len(self._rewards) >= self._steps if self.when == "steps" else self._stands_still()
        if due:
            self._rewards = []
        return due

    def _stands_still(self) -> bool:
        before, now = self._rewards[-2 * self._steps : -self._steps], self._rewards[-self._steps :]
        return len(before) == self._steps and sum(now) <= sum(before)

    def state(self) -> list[float]:
        """What a checkpoint keeps."""
        return list(self._rewards)

    def restore(self, state: list[float]) -> None:
        """Goes back to what :meth:`state` returned."""
        self._rewards = list(state)
