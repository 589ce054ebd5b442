"""What changes in the course of a run: the KL coefficient, the group size, and when the reference is renewed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

Refresh = Literal["never", "steps", "plateau", "average"]

MAX_KL_ERROR = 0.2
"""Relative error that one step answers to, as in Ziegler et al.: single steps are noisy."""


class HasKL(Protocol):
    """The loss, or the buffer."""

    kl_coef: float


class HasModel(Protocol):
    """The policy."""

    model: Any


class Refreshable(Protocol):
    """The reference."""

    def refresh(self, model: torch.nn.Module, decay: float) -> None:
        """Moves towards a model: decay of itself, and the rest of the model."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Its weights."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes weights back."""
        ...


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
            raise ValueError(f"gain={gain}; it must be more than 0, and at most 1")
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
        changes: pairs of a step, counted from 1, and the group size from it on.

    Raises:
        ValueError: a pair is none, a step is not one, or a group has fewer than two answers.

    >>> sizes = GroupSizes(8, [(3, 4)])
    >>> [sizes.at(step) for step in (1, 2, 3, 4)], sizes.steps_for(100, prompts=4)
    ([8, 8, 4, 4], 5)
    """

    def __init__(self, first: int, changes: Sequence[Sequence[int]] = ()) -> None:
        if not isinstance(changes, Sequence):
            raise ValueError(f"train.repeats_schedule is {changes}; give pairs, as [[100, 4]], or []")
        for pair in changes:
            if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(n, int) for n in pair):
                raise ValueError(
                    f"train.repeats_schedule has {pair}; give pairs of a step and the group size from it on: [[100, 4]]"
                )
        self._changes = {1: first} | {step: size for step, size in changes}
        for step, size in self._changes.items():
            if step < 1 or size < 2:
                raise ValueError(
                    f"train.repeats_schedule has a group size of {size} from step {step} on; a step is 1 or more, and "
                    "a group has at least 2 answers"
                )

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

    Source: renewed in rounds, DeepSeekMath, https://arxiv.org/abs/2402.03300, algorithm 1; a moving average, WARP,
    https://arxiv.org/abs/2406.16768, section 3.1.

    Args:
        when: one of these.
        steps: of ``steps`` and ``plateau``.
        decay: of ``average``: the reference keeps this share of itself.

    Raises:
        ValueError: there is no such rule, or a number is out of range.

    >>> rule = RefreshRule("plateau", steps=2)
    >>> [rule.is_due(reward) for reward in (0.1, 0.2, 0.5, 0.6, 0.5, 0.6, 0.6, 0.6, 0.6)]
    [False, False, False, False, False, True, False, False, False]
    """

    def __init__(self, when: Refresh = "never", steps: int = 100, decay: float = 0.99) -> None:
        if when not in get_args(Refresh):
            raise ValueError(f"ref_model.refresh={when}; choose one of {', '.join(get_args(Refresh))}")
        if steps < 1:
            raise ValueError(f"ref_model.refresh_steps={steps}; it must be 1 or more")
        if not 0 <= decay < 1:
            raise ValueError(f"ref_model.decay={decay}; it must be at least 0 and less than 1")
        self.when, self._steps = when, steps
        self.decay = decay if when == "average" else 0.0
        """What the reference keeps of itself when it is renewed; 0 makes it a copy."""
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


class Schedules:
    """All that changes in the course of one run, set before each step and moved on behind it.

    Args:
        sizes: of groups.
        kl: the coefficient of the KL term.
        refresh: when the reference is renewed.
        terms: what has a ``kl_coef``: the loss, or the buffer that charges rewards with it.
        reference: the frozen reference; None where there is none.
        policy: whose copy it becomes.

    Raises:
        ValueError: a reference is to be renewed, and there is none.
    """

    def __init__(
        self,
        sizes: GroupSizes,
        kl: AdaptiveKL,
        refresh: RefreshRule,
        terms: HasKL,
        reference: Refreshable | None = None,
        policy: HasModel | None = None,
    ) -> None:
        if refresh.when != "never" and reference is None:
            raise ValueError(f"ref_model.refresh={refresh.when} renews the reference of a KL term; set policy.kl_coef")
        self._sizes, self._kl, self._refresh = sizes, kl, refresh
        self._terms, self._reference, self._policy = terms, reference, policy
        self._refreshed = 0

    def group_size(self, step: int) -> int:
        """The group size of a step, counted from 1."""
        return self._sizes.at(step)

    @property
    def kl_coef(self) -> float:
        """The weight that the KL term has now."""
        return self._terms.kl_coef

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Moves on behind a step with these metrics; what is to be logged beside them."""
        if self._reference is None:
            return {}
        logged = {"kl/coef": self.kl_coef}  # what the step was trained with
        self._terms.kl_coef = self._kl.update(metrics.get("kl/ref", math.nan))
        # Groups that dynamic sampling left out count: those that it keeps look alike however good the policy is.
        if self._refresh.is_due(metrics.get("reward/sampled_mean", metrics["reward/mean"])):
            assert self._policy is not None
            self._reference.refresh(self._policy.model, self._refresh.decay)
            self._refreshed += 1
        return logged | ({"reference/refreshes": self._refreshed} if self._refresh.when != "never" else {})

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the coefficient, and a reference that is no longer what training began with."""
        weights = self._reference.state() if self._reference is not None and self._refreshed else None
        return {
            "kl_coef": self._kl.coef,
            "refreshed": self._refreshed,
            "rewards": self._refresh.state(),
            "reference": weights,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to what :meth:`state` returned."""
        self._kl.coef, self._refreshed = state["kl_coef"], state["refreshed"]
        self._refresh.restore(state["rewards"])
        if self._reference is not None:
            self._terms.kl_coef = self._kl.coef
            if state["reference"] is not None:
                self._reference.restore(state["reference"])
