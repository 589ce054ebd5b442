"""Schedules of a run: the coefficients of KL and entropy, and when the reference is refreshed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from grpo_rl.data.advantages import AdvantageEstimator
    from grpo_rl.losses.grpo import GRPOLoss
    from grpo_rl.policies.policy import Reference, TrainPolicy

Refresh = Literal["never", "steps", "average"]

MAX_KL_ERROR = 0.2
"""Clip of the relative error of one step, as in Ziegler et al.: single steps are noisy."""


class AdaptiveKL:
    r"""The coefficient of the KL term, adapted to keep the measured KL near a target.

    Each step multiplies it by $1 + K\,\mathrm{clip}(\mathrm{KL} / \mathrm{target} - 1, -0.2, 0.2)$.
    Source: Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2, where the KL is that of whole
    responses; here it is the mean over tokens, the metric ``kl/ref``.

    Args:
        coef: the coefficient at the start.
        target: KL to the reference, in nats per token; None keeps the coefficient constant.
        gain: K.

    Raises:
        ValueError: there is a target but no coefficient to start from.

    A KL of twice the target counts as an error of 0.2:

    >>> kl = AdaptiveKL(0.1, target=0.02, gain=0.5)
    >>> round(kl.update(0.04), 4), round(kl.update(0.018), 4)
    (0.11, 0.1045)
    """

    def __init__(self, coef: float, target: float | None = None, gain: float = 0.1) -> None:
        if target is not None and not (target > 0 and coef > 0):
            raise ValueError(f"policy.target_kl={target} with policy.kl_coef={coef}; both must be more than 0")
        self.coef, self._target, self._gain = coef, target, gain

    def update(self, kl: float) -> float:
        """The coefficient after a step whose KL to the reference was ``kl``; a non-finite KL changes nothing."""
        if self._target is not None and math.isfinite(kl):
            error = max(-MAX_KL_ERROR, min(MAX_KL_ERROR, kl / self._target - 1))
            self.coef *= 1 + self._gain * error
        return self.coef


class AdaptiveEntropy:
    """The coefficient of the entropy bonus, adapted to hold the entropy near a target, in nats per token.

    It rises by ``delta`` after each step whose entropy is at most the target, falls by as much after others, between 0
    and ``most``, and is in force only after the former; not before the first. Without a target it is not updated.
    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312; TRL's ``use_adaptive_entropy``, which adapts after each
    optimizer step.

    >>> entropy = AdaptiveEntropy(target=0.2)
    >>> [entropy.update(value) for value in (0.1, 0.3, 0.1)]
    [0.005, 0.0, 0.005]
    """

    def __init__(self, coef: float = 0.0, target: float | None = None, delta: float = 0.005, most: float = 1.0) -> None:
        self.coef, self.target, self._delta, self._most = coef, target, delta, most

    def update(self, entropy: float) -> float:
        """The weight of the bonus after a step of this entropy."""
        below = entropy <= self.target
        self.coef = min(max(self.coef + (self._delta if below else -self._delta), 0.0), self._most)
        return self.coef if below else 0.0


class RefreshRule:
    """The rule by which the frozen reference is refreshed from the policy.

    - ``never``: it keeps the weights that training started from.
    - ``steps``: it becomes a copy of the policy every ``steps`` steps.
    - ``average``: after every step it moves towards the policy, as a moving average.

    Source: iterative refresh, DeepSeekMath, https://arxiv.org/abs/2402.03300, algorithm 1; a moving average, WARP,
    https://arxiv.org/abs/2406.16768, section 3.1.

    Args:
        steps: interval of ``steps``.
        decay: share of itself that the reference keeps in each step of ``average``.

    >>> rule = RefreshRule("steps", steps=2)
    >>> [rule.is_due() for _ in range(4)]
    [False, True, False, True]
    """

    def __init__(self, when: Refresh = "never", steps: int = 100, decay: float = 0.99) -> None:
        assert when in get_args(Refresh), when
        self.when, self._interval, self.steps = when, steps, 0
        self.decay = decay if when == "average" else 0.0
        """Share of itself that the reference keeps in a refresh; 0 makes it a copy."""

    def is_due(self) -> bool:
        """Counts a step; returns whether the reference is to be refreshed after it."""
        self.steps += 1
        return self.when == "average" or (self.when == "steps" and self.steps % self._interval == 0)


class Schedules:
    """All schedules of one run, advanced after each step.

    Args:
        terms: the owner of ``kl_coef``: the loss, or the advantage estimator for KL-penalised rewards.
        loss: the owner of ``entropy_coef``; None: there is none.
    """

    def __init__(
        self,
        kl: AdaptiveKL,
        refresh: RefreshRule,
        terms: GRPOLoss | AdvantageEstimator,
        reference: Reference | None = None,
        policy: TrainPolicy | None = None,
        entropy: AdaptiveEntropy | None = None,
        loss: GRPOLoss | None = None,
    ) -> None:
        self._kl, self._refresh = kl, refresh
        self._terms, self._reference, self._policy = terms, reference, policy
        self._entropy, self._loss = entropy or AdaptiveEntropy(), loss
        self._refreshed = 0

    @property
    def coefs(self) -> dict[str, float]:
        """The current weights of the loss's terms, by their settings."""
        return {"kl_coef": self._terms.kl_coef} | ({"entropy_coef": self._loss.entropy_coef} if self._loss else {})

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Advances the schedules after a step with these metrics; returns further metrics."""
        logged: dict[str, float] = {}
        if self._loss and self._entropy.target is not None:
            logged["entropy_coef"] = self._loss.entropy_coef
            if (entropy := metrics.get("entropy")) is not None:  # none where nothing was trained on
                self._loss.entropy_coef = self._entropy.update(entropy)
        if self._reference is None:
            return logged
        logged["kl/coef"] = self._terms.kl_coef  # that of the step itself
        self._terms.kl_coef = self._kl.update(metrics.get("kl/ref", math.nan))
        if self._refresh.is_due():
            assert self._policy is not None
            self._reference.refresh(self._policy.model, self._refresh.decay)
            self._refreshed += 1
        return logged | ({"reference/refreshes": self._refreshed} if self._refresh.when != "never" else {})

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores: the coefficient, and the reference once it was refreshed."""
        weights = self._reference.state() if self._reference is not None and self._refreshed else None
        counts = {"refreshed": self._refreshed, "steps": self._refresh.steps}
        entropy = [self._entropy.coef, self._loss.entropy_coef] if self._loss else None
        return {"kl_coef": self._kl.coef, "entropy_coef": entropy, **counts, "reference": weights}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self._kl.coef, self._refreshed = state["kl_coef"], state["refreshed"]
        self._refresh.steps = state["steps"]
        if self._loss and self._entropy.target is not None:
            self._entropy.coef, self._loss.entropy_coef = state["entropy_coef"]
        if self._reference is not None:
            self._terms.kl_coef = self._kl.coef
            if state["reference"] is not None:
                self._reference.restore(state["reference"])
