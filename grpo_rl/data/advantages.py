"""The step from a collection's groups to their advantages.

Letters: G responses and R tokens of a group, N groups of one size.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.data.turns import turn_advantages
from grpo_rl.losses.advantage import batch_advantages
from grpo_rl.losses.factors import ADVANTAGE, check_advantage, named
from grpo_rl.losses.kl import kl_estimate


class AdvantageEstimator:
    """Turns the rewards of a collection's groups into advantages: clip the rewards, subtract the KL penalty, normalise.

    Args:
        kind: see `grpo_rl.losses.advantage.batch_advantages`; the batch is the groups of one call.
        clip: advantages are clipped to [-clip, clip].
        kl_coef: weight of the KL penalty in the reward; a schedule may change it between calls.
        kl: the estimate of that KL, see :func:`kl_penalty`.
        reward_clip: rewards are first clipped to [-reward_clip, reward_clip].
        turn_credit: weight of a turn's advantage, which is added to the response's (`grpo_rl.data.turns`).
        turn_discount: factor of a turn's reward for each turn to come.
        settings: of the function, such as ``reward_weights`` of ``multi_reward``.

    Raises:
        ValueError: the settings give no advantage.

    >>> from grpo_rl.testing import random_group
    >>> (group,) = AdvantageEstimator("no_std")([random_group(rewards=[0.0, 3.0])])
    >>> group.advantages
    tensor([-1.5000,  1.5000])
    """

    def __init__(
        self,
        kind: str | Callable[..., Any] = "zscore",
        clip: float | None = None,
        kl_coef: float = 0.0,
        kl: str = "k1",
        reward_clip: float | None = None,
        turn_credit: float = 0.0,
        turn_discount: float = 0.95,
        **settings: Any,
    ) -> None:
        function = ADVANTAGE.bound(kind, **settings)
        if unread := settings.keys() - function.keywords.keys():
            raise ValueError(f"loss.advantage={named(function)} has no {', '.join(sorted(unread))}")
        check_advantage(function, kl_coef, kl, reward_clip, turn_credit)
        self._function, self._clip = function, clip
        self._most = math.inf if clip is None else clip
        self.kl_coef, self._kl = kl_coef, kl
        self._turn_credit, self._turn_discount = turn_credit, turn_discount
        self._reward_clip = math.inf if reward_clip is None else reward_clip

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with their advantages; ``Group.rewards`` stay as the task gave them.

        Sessions are compared, each once, whose responses then all have its advantage.

        Raises:
            ValueError: rewards that give no advantage, see :func:`group_advantages`.
        """
        by_size: dict[int, list[int]] = defaultdict(list)
        sessions = [_sessions(group) for group in groups]
        for i, (first, _) in enumerate(sessions):
            by_size[len(first)].append(i)
        tables = [[groups[i] for i in members] for members in by_size.values()]
        rewards = [self._penalised_rewards(table) for table in tables]
        names = dict.fromkeys(name for group in groups for name in group.reward_parts)
        takes_parts = "parts" in inspect.signature(self._function).parameters
        parts = [_stacked_parts(table, names) for table in tables] if takes_parts else []
        advantages = batch_advantages(rewards, self._function, self._clip, parts)
        rows = {i: row for members, table in zip(by_size.values(), advantages, strict=True)
                for i, row in zip(members, table, strict=True)}  # fmt: skip
        found = [group.with_advantages(rows[i][sessions[i][1]]) for i, group in enumerate(groups)]
        return [self._with_turns(group) for group in found] if self._turn_credit else found

    def _with_turns(self, group: Group) -> Group:
        assert group.advantages is not None
        if not group.advantages.any():
            return group
        rewards = self._penalised_rewards([group])[0][_sessions(group)[1]]
        turns = turn_advantages(group, rewards, self._turn_discount, self._function)
        summed = group.advantages.repeat_interleave(group.lengths) + self._turn_credit * turns
        return group.with_advantages(group.advantages, summed.clamp(-self._most, self._most))

    def _penalised_rewards(self, groups: Sequence[Group]) -> Float[Tensor, "N G"]:
        rewards = torch.stack([group.rewards[_sessions(group)[0]] for group in groups])
        rewards = rewards.clamp(-self._reward_clip, self._reward_clip)
        if not self.kl_coef:
            return rewards
        return rewards - self.kl_coef * torch.stack([_summed(group, kl_penalty(group, self._kl)) for group in groups])


def _sessions(group: Group) -> tuple[Tensor, Tensor]:
    """The first response of each session, and the number of each response's session; without any, each is its own.

    >>> from types import SimpleNamespace
    >>> _sessions(SimpleNamespace(sessions=torch.tensor([4, 4, 7])))
    (tensor([0, 2]), tensor([0, 0, 1]))
    """
    if group.sessions is None:
        each = torch.arange(group.size)
        return each, each
    numbers, of = group.sessions.unique(return_inverse=True)
    first = torch.full_like(numbers, len(of)).scatter_reduce(0, of, torch.arange(len(of)), "amin")
    return first, of


def _summed(group: Group, values: Float[Tensor, " G"]) -> Tensor:
    first, of = _sessions(group)
    return values.new_zeros(len(first)).index_add(0, of, values)


def _stacked_parts(groups: Sequence[Group], names: Iterable[str]) -> dict[str, Float[Tensor, "N G"]]:
    """Each part of the rewards; NaN where a response lacks it."""

    def column(group: Group, name: str) -> Float[Tensor, " G"]:
        part = group.reward_parts.get(name)
        return (torch.full_like(group.rewards, torch.nan) if part is None else part)[_sessions(group)[0]]

    return {name: torch.stack([column(group, name) for group in groups]) for name in names}


def kl_penalty(group: Group, kl: str = "k1") -> Float[Tensor, " G"]:
    """Each response's KL from the reference, in nats: the sum of the estimates of its trained tokens.

    Both log-probabilities are the trainer's, before the update: the sampler's would include the engine's rounding.
    Source: RLOO, https://arxiv.org/abs/2402.14740, section 2.1, with k1; as in PPO.

    Args:
        group: with ``old_log_probs`` and ``ref_log_probs``, see `TrainPolicy.add_log_probs` and `ReferencePolicy`.
        kl: k1, k2 or k3.

    >>> from dataclasses import replace
    >>> from grpo_rl.testing import random_group
    >>> group = replace(random_group(lengths=[1, 2]), old_log_probs=torch.tensor([-1.0, -1.0, -2.0]),
    ...                 ref_log_probs=torch.tensor([-3.0, -1.0, -1.5]))
    >>> kl_penalty(group)
    tensor([ 2.0000, -0.5000])
    """
    assert group.old_log_probs is not None and group.ref_log_probs is not None, "call both policies' add_log_probs"
    estimate = torch.where(group.trainable, kl_estimate(kl, group.old_log_probs, group.ref_log_probs), 0.0)
    return estimate.new_zeros(group.size).index_add(0, torch.repeat_interleave(group.lengths), estimate)


def token_advantages(group: Group) -> Float[Tensor, " R"]:
    """The advantage of each token: its own, or its response's."""
    if group.token_advantages is not None:
        return group.token_advantages
    assert group.advantages is not None
    return group.advantages.repeat_interleave(group.lengths)
