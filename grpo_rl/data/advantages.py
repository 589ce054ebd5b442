"""Advantages: each response's reward relative to its group's. Letters: G responses of a group, N groups of one size."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_rl.data.group import Group
from grpo_rl.losses.choices import KL, check_advantage
from grpo_rl.losses.choices import Advantage as Kind
from grpo_rl.losses.kl import kl_estimate

GROUP_KINDS = ("zscore", "no_std", "leave_one_out")
"""The kinds that are computed for each group by itself; the others need all groups of a collection."""

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL (verl adds 1e-6): near-equal rewards give small advantages."""


class AdvantageEstimator:
    """Turns the rewards of a collection's groups into advantages: clip the rewards, subtract the KL penalty, normalise.

    Args:
        kind: see :func:`group_advantages` and :func:`batch_advantages`; the batch is the groups of one call.
        clip: advantages are clipped to [-clip, clip].
        reward_weights: weights of the parts of the reward, for ``multi_reward``.
        kl_coef: weight of the KL penalty in the reward; a schedule may change it between calls.
        kl: the estimate of that KL, see :func:`kl_penalty`.
        reward_clip: rewards are first clipped to [-reward_clip, reward_clip].

    Raises:
        ValueError: the settings give no advantage.

    >>> from grpo_rl.testing import random_group
    >>> (group,) = AdvantageEstimator("no_std")([random_group(rewards=[0.0, 3.0])])
    >>> group.advantages
    tensor([-1.5000,  1.5000])
    """

    def __init__(
        self,
        kind: Kind = "zscore",
        clip: float | None = None,
        reward_weights: Mapping[str, float] | None = None,
        kl_coef: float = 0.0,
        kl: KL = "k1",
        reward_clip: float | None = None,
    ) -> None:
        check_advantage(kind, kl_coef, kl, reward_clip)
        self._kind, self._clip, self._weights = kind, clip, reward_weights
        self.kl_coef, self._kl = kl_coef, kl
        self._reward_clip = math.inf if reward_clip is None else reward_clip

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with their advantages; ``Group.rewards`` stay as the task gave them.

        Sessions are compared, each once, whose responses then all have its advantage.

        Raises:
            ValueError: rewards that give no advantage, see :func:`group_advantages`, or log-probabilities are missing.
        """
        by_size: dict[int, list[int]] = defaultdict(list)
        sessions = [_sessions(group) for group in groups]
        for i, (first, _) in enumerate(sessions):
            by_size[len(first)].append(i)
        tables = [[groups[i] for i in members] for members in by_size.values()]
        rewards = [self._penalised_rewards(table) for table in tables]
        # A part that is weighed may be of no response of these.
        names = dict.fromkeys([*(name for group in groups for name in group.reward_parts), *(self._weights or {})])
        parts = [_stacked_parts(table, names) for table in tables] if self._kind == "multi_reward" else []
        advantages = batch_advantages(rewards, self._kind, self._clip, parts, self._weights)
        rows = {i: row for members, table in zip(by_size.values(), advantages, strict=True)
                for i, row in zip(members, table, strict=True)}  # fmt: skip
        return [group.with_advantages(rows[i][sessions[i][1]]) for i, group in enumerate(groups)]

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
    """The sum of the values of each session's responses."""
    first, of = _sessions(group)
    return values.new_zeros(len(first)).index_add(0, of, values)


def _stacked_parts(groups: Sequence[Group], names: Iterable[str]) -> dict[str, Float[Tensor, "N G"]]:
    """Each part of the rewards; NaN where a response lacks it."""

    def column(group: Group, name: str) -> Float[Tensor, " G"]:
        part = group.reward_parts.get(name)
        return (torch.full_like(group.rewards, torch.nan) if part is None else part)[_sessions(group)[0]]

    return {name: torch.stack([column(group, name) for group in groups]) for name in names}


def group_advantages(rewards: Float[Tensor, "*N G"], kind: Kind = "zscore") -> Float[Tensor, "*N G"]:
    """Advantage of each response; a group's sum to zero, and equal rewards give exact zeros.

    Args:
        rewards: of the responses to one prompt, or to each of several.
        kind: ``zscore`` is (r - mean) / (std + 1e-4) with the unbiased std: GRPO, https://arxiv.org/abs/2402.03300;
            ``no_std`` is r - mean: Dr. GRPO, https://arxiv.org/abs/2503.20783, as dividing by the std gives very easy
            and very hard prompts more weight; ``leave_one_out`` is r - mean of the other responses: RLOO,
            https://arxiv.org/abs/2402.14740.

    Raises:
        ValueError: there are fewer than two responses, a reward is not finite, or the kind is not one of a group.

    One correct response of four: mean 1/4, deviations -1/4 and 3/4, variance (3/16 + 9/16) / 3 = 1/4:

    >>> rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    >>> group_advantages(rewards)
    tensor([-0.4999, -0.4999, -0.4999,  1.4997])
    >>> group_advantages(rewards, "leave_one_out")
    tensor([-0.3333, -0.3333, -0.3333,  1.0000])
    """
    size = rewards.shape[-1]
    if size < 2:
        raise ValueError(f"a group of {size} responses has nothing to compare with; env.repeats must be at least 2")
    finite = rewards.isfinite().all(-1, keepdim=True)
    if not finite.all():
        raise ValueError(f"rewards must be finite, got {rewards[~finite.expand_as(rewards)][:size].tolist()}")
    if kind not in GROUP_KINDS:
        check_advantage(kind)
        raise ValueError(
            f"{kind} needs all groups of a collection, see batch_advantages; for one: {', '.join(GROUP_KINDS)}"
        )
    # Rounding of the mean would leave equal rewards a residue, which the z-score then magnifies up to 10,000 times.
    equal = (rewards == rewards[..., :1]).all(-1, keepdim=True)
    wide = rewards.double()  # the squares of large rewards overflow fp32, and a std of infinity would hide them all
    deviations = (wide - wide.mean(-1, keepdim=True)).masked_fill(equal, 0.0)
    if kind == "leave_one_out":
        # r_i - (sum - r_i) / (G - 1) = (r_i - mean) * G / (G - 1)
        deviations = deviations * (size / (size - 1))
    elif kind == "zscore":
        deviations = deviations / (wide.std(-1, keepdim=True) + STD_EPSILON)
    advantages = deviations.to(rewards.dtype)
    if not advantages.isfinite().all():
        raise ValueError(
            f"rewards as large as {rewards.abs().max():.3g} have advantages beyond the range of {rewards.dtype}; scale "
            "them down in the task, or set train.reward_clip"
        )
    return advantages


def batch_advantages(
    rewards: Sequence[Float[Tensor, "N G"]],
    kind: Kind = "zscore",
    clip: float | None = None,
    parts: Sequence[Mapping[str, Float[Tensor, "N G"]]] = (),
    weights: Mapping[str, float] | None = None,
) -> list[Float[Tensor, "N G"]]:
    """Advantages of all groups of a collection, in the layout of ``rewards``.

    A group's advantages sum to zero, unless ``clip`` changes some. Further kinds, beyond :func:`group_advantages`:

    - ``batch_std``: (r - mean of the group) / (std of all rewards + 1e-4): Lite PPO, https://arxiv.org/abs/2508.08221;
      TRL's ``scale_rewards="batch"``.
    - ``batch_zscore``: (r - mean of the group) over the std of all these differences + 1e-4, so that different
      difficulties of prompts don't count as spread: REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262.
    - ``multi_reward``: for each part of the reward the z-score in its group, among the responses that have the part,
      then their weighted sum, over the std of all these sums + 1e-4, so that no part is drowned by the scale of
      another: GDPO, https://arxiv.org/abs/2601.05242; TRL's ``multi_objective_aggregation="normalize_then_sum"``.

    Both papers also subtract the mean of the whole batch, which is zero as each group's is.

    Args:
        rewards: a table for each group size.
        clip: advantages are clipped to [-clip, clip].
        parts: parts of the reward, a table by name for each of ``rewards``, NaN where a response has no such part;
            read by ``multi_reward``.
        weights: weights of the parts, 1 by default.

    Raises:
        ValueError: as :func:`group_advantages`, or parts are missing, or a weight names an unknown part.

    Two groups whose rewards spread by 1 and by 3: the differences are ±0.5 and ±1.5, their variance 5/3.

    >>> batch_advantages([torch.tensor([[0.0, 1.0], [0.0, 3.0]])], "batch_zscore")
    [tensor([[-0.3873,  0.3873],
            [-1.1618,  1.1618]])]
    """
    check_advantage(kind)
    if kind in GROUP_KINDS:
        advantages = [group_advantages(table, kind) for table in rewards]
    elif kind == "multi_reward":
        advantages = [_sum_of_parts(of_table, weights or {}) for of_table in parts]
        advantages = _over_std(advantages, advantages)
    else:
        advantages = [group_advantages(table, "no_std") for table in rewards]
        advantages = _over_std(advantages, rewards if kind == "batch_std" else advantages)
    return advantages if clip is None else [table.clamp(-clip, clip) for table in advantages]


def _sum_of_parts(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    if not parts or weights.keys() - parts.keys():
        raise ValueError(
            f"loss.advantage=multi_reward with loss.reward_weights {dict(weights)}, but the rewards have the parts "
            f"{sorted(parts)}; name these, or choose another loss.advantage"
        )
    scores = [weights.get(name, 1.0) * _z_scores_where_present(table) for name, table in parts.items()]
    return torch.stack(scores).sum(0)


def _z_scores_where_present(part: Float[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """The z-scores of a part of the reward in each group, among its responses that have the part; 0 for the others.

    >>> _z_scores_where_present(torch.tensor([[torch.nan, 0.0, 1.0], [torch.nan, torch.nan, 1.0]]))
    tensor([[ 0.0000, -0.7070,  0.7070],
            [ 0.0000,  0.0000,  0.0000]])
    """
    if not part.isnan().any():
        return group_advantages(part)
    scores = torch.zeros_like(part)
    for own, of_group in zip(scores, part, strict=True):
        has = ~of_group.isnan()
        if has.sum() > 1:
            own[has] = group_advantages(of_group[has])
    return scores


def _over_std(tables: Sequence[Tensor], spread: Sequence[Tensor]) -> list[Tensor]:
    if not spread:
        return []
    std = torch.cat([table.flatten() for table in spread]).double().std()  # squares of large rewards overflow fp32
    return [table / (std + STD_EPSILON) for table in tables]


def kl_penalty(group: Group, kl: KL = "k1") -> Float[Tensor, " G"]:
    """Each response's KL from the reference, in nats: the sum of the estimates of its trained tokens.

    Both log-probabilities are the trainer's, before the update: the sampler's would include the engine's rounding.
    Source: RLOO, https://arxiv.org/abs/2402.14740, section 2.1, with k1; as in PPO.

    Args:
        group: with ``old_log_probs`` and ``ref_log_probs``.
        kl: k1, k2 or k3.

    Raises:
        ValueError: log-probabilities are missing.

    >>> from dataclasses import replace
    >>> from grpo_rl.testing import random_group
    >>> group = replace(random_group(lengths=[1, 2]), old_log_probs=torch.tensor([-1.0, -1.0, -2.0]),
    ...                 ref_log_probs=torch.tensor([-3.0, -1.0, -1.5]))
    >>> kl_penalty(group)
    tensor([ 2.0000, -0.5000])
    """
    if group.old_log_probs is None or group.ref_log_probs is None:
        raise ValueError(
            f"group {group.group_id} lacks log-probabilities of the policy or the reference, which loss.kl_in=reward "
            "compares; write them with TrainPolicy.add_log_probs and ReferencePolicy.add_log_probs"
        )
    estimate = torch.where(group.trainable, kl_estimate(kl, group.old_log_probs, group.ref_log_probs), 0.0)
    return estimate.new_zeros(group.size).index_add(0, torch.repeat_interleave(group.lengths), estimate)
