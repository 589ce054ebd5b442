"""Advantages from tables of rewards. Letters: G responses of a group, N groups of one size."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_rl.losses.factors import ADVANTAGE, call, named

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL (verl adds 1e-6): near-equal rewards give small advantages."""
Table = Float[Tensor, "*N G"]


@ADVANTAGE.add("zscore", "(r - mean) / (std + 1e-4)")
def zscore(rewards: Table) -> Table:
    """The deviations over the unbiased std: GRPO, https://arxiv.org/abs/2402.03300."""
    return no_std(rewards) / (rewards.std(-1, keepdim=True) + STD_EPSILON)


@ADVANTAGE.add("no_std", "r - mean")
def no_std(rewards: Table) -> Table:
    """The deviations from the group's mean: Dr. GRPO, https://arxiv.org/abs/2503.20783.

    Dividing by the std gives very easy and very hard prompts more weight.
    """
    return rewards - rewards.mean(-1, keepdim=True)


@ADVANTAGE.add("leave_one_out", "r - mean of the others")
def leave_one_out(rewards: Table) -> Table:
    """The deviations from the mean of the other responses: RLOO, https://arxiv.org/abs/2402.14740."""
    size = rewards.shape[-1]
    # r_i - (sum - r_i) / (G - 1) = (r_i - mean) * G / (G - 1)
    return no_std(rewards) * (size / (size - 1))


@ADVANTAGE.add("maxrl", "(r - mean) / mean, for rewards of 0 or more", never_negative=True)
def maxrl(rewards: Table) -> Table:
    """The deviations over the group's mean reward: MaxRL, https://arxiv.org/abs/2602.02710; prime-rl.

    With rewards of 0 and 1 the expected gradient nears that of the log of the pass rate as groups grow, so that hard
    prompts weigh more. Where no response earns anything, advantages are 0.

    Raises:
        ValueError: a reward is below 0.

    One correct response of four, then three; none:

    >>> maxrl(torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    tensor([[-1.0000, -1.0000, -1.0000,  3.0000],
            [-1.0000,  0.3333,  0.3333,  0.3333],
            [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """
    if (rewards < 0).any():
        least = rewards.min().item()
        raise ValueError(f"loss.advantage=maxrl divides by the mean reward, and a reward is {least:.3g}; use 0 or more")
    mean = rewards.mean(-1, keepdim=True)
    return torch.where(mean > 0, no_std(rewards) / mean, 0.0)


@ADVANTAGE.add("gpg", "r - mean, over the share of groups with variance")
def gpg(tables: Sequence[Table]) -> list[Table]:
    """GPG, https://arxiv.org/abs/2504.02546, eq. 7: groups without variance shrink no gradient of the others.

    verl counts the responses with a reward other than 0 in the place of those in groups with variance.

    One group of two has variance, so that its deviations of 0.5 count twice:

    >>> gpg([torch.tensor([[0.0, 1.0], [1.0, 1.0]])])
    [tensor([[-1.,  1.],
            [ 0.,  0.]])]
    """
    live = [(table != table[..., :1]).any(-1) for table in tables]
    share = sum(int(each.sum()) for each in live) / max(1, sum(len(each) for each in live))
    return [group_advantages(table, "no_std") / (share or 1.0) for table in tables]


@ADVANTAGE.add("batch_std", "(r - mean) over the std of all r of the collection")
def batch_std(tables: Sequence[Table]) -> list[Table]:
    """Lite PPO, https://arxiv.org/abs/2508.08221; TRL's ``scale_rewards="batch"``."""
    return _over_std([group_advantages(table, "no_std") for table in tables], tables)


@ADVANTAGE.add("batch_zscore", "over the std of all r - mean")
def batch_zscore(tables: Sequence[Table]) -> list[Table]:
    """REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262: different difficulties of prompts are no spread."""
    deviations = [group_advantages(table, "no_std") for table in tables]
    return _over_std(deviations, deviations)


@ADVANTAGE.add("multi_reward", "z-scores of the parts, summed, over the std of the collection")
def multi_reward(
    parts: Sequence[Mapping[str, Table]],
    reward_weights: Annotated[
        Mapping[str, float], Field(description="weights of the parts of the reward, 1 where none is given")
    ] = {},
) -> list[Table]:
    """GDPO, https://arxiv.org/abs/2601.05242; TRL's ``multi_objective_aggregation="normalize_then_sum"``.

    For each part of the reward the z-score in its group, among the responses that have the part; then their weighted
    sum, over the std of all these sums, so that no part is drowned by the scale of another.

    Raises:
        ValueError: the rewards have no parts.
    """
    sums = [_sum_of_parts(of_table, reward_weights) for of_table in parts]
    return _over_std(sums, sums)


def group_advantages(rewards: Table, kind: str | Callable[..., Table] = "zscore") -> Table:
    """Advantage of each response; equal rewards give exact zeros.

    Args:
        rewards: of the responses to one prompt, or to each of several.
        kind: a function of each group by itself, from its rewards in fp64, or its name.

    Raises:
        ValueError: there are fewer than two responses, a reward is not finite, or an advantage is none.

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
    # The squares of large rewards overflow fp32, and a std of infinity would hide them all.
    function = ADVANTAGE.function(kind)
    advantages = call(function, rewards=rewards.double())
    if not isinstance(advantages, Tensor) or advantages.shape != rewards.shape:
        raise ValueError(f"{named(function)} returned {advantages!r:.80}; return a tensor of shape {[*rewards.shape]}")
    # Rounding of the mean would leave equal rewards a residue, which the z-score then magnifies up to 10,000 times.
    equal = (rewards == rewards[..., :1]).all(-1, keepdim=True)
    advantages = advantages.masked_fill(equal, 0.0).to(rewards.dtype)
    if not advantages.isfinite().all():
        raise ValueError(
            f"rewards as large as {rewards.abs().max():.3g} have advantages beyond the range of {rewards.dtype}; scale "
            "them down in the task, or set train.reward_clip"
        )
    return advantages


def batch_advantages(
    tables: Sequence[Float[Tensor, "N G"]],
    kind: str | Callable[..., Table | list[Table]] = "zscore",
    clip: float | None = None,
    parts: Sequence[Mapping[str, Float[Tensor, "N G"]]] = (),
) -> list[Float[Tensor, "N G"]]:
    """Advantages of all groups of a collection, in the layout of ``tables``.

    A group's advantages sum to zero with each of the project's functions, unless ``clip`` changes some. The papers of
    ``batch_zscore`` and ``multi_reward`` also subtract the mean of the whole batch, which is zero as each group's is.

    Args:
        tables: the rewards, a table for each group size.
        kind: one of the functions above or its name, or one of the user's own: of ``rewards``, a table [N, G] in fp64,
            for groups by themselves; of ``tables`` or ``parts`` for all of a collection, which returns a list.
        clip: advantages are clipped to [-clip, clip].
        parts: parts of the reward, a table by name for each of ``tables``, NaN where a response has no such part.

    Raises:
        ValueError: as :func:`group_advantages` and the functions.

    Two groups whose rewards spread by 1 and by 3: the differences are ±0.5 and ±1.5, their variance 5/3.

    >>> batch_advantages([torch.tensor([[0.0, 1.0], [0.0, 3.0]])], "batch_zscore")
    [tensor([[-0.3873,  0.3873],
            [-1.1618,  1.1618]])]
    """
    function = ADVANTAGE.function(kind)
    if "rewards" in inspect.signature(function).parameters:
        advantages = [group_advantages(table, function) for table in tables]
    else:
        advantages = call(function, tables=tables, parts=parts)
        listed = advantages if isinstance(advantages, list | tuple) else [advantages]
        shapes = [list(getattr(table, "shape", ())) for table in listed]
        if shapes != (wanted := [list(table.shape) for table in tables]):
            raise ValueError(f"{named(function)} returned tensors of shapes {shapes}; return a list of {wanted}")
    return advantages if clip is None else [table.clamp(-clip, clip) for table in advantages]


def _sum_of_parts(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    if not parts:
        raise ValueError("loss.advantage=multi_reward, but the rewards have no parts; choose another loss.advantage")
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
