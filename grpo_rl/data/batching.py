"""Splits the groups of an optimizer step into micro-batches, and shares them out among training processes.

Sequences of tokens that begin alike make a tree: no branch's tokens need to be computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Integer, Shaped
from tensordict import TensorDictBase
from torch import Tensor

from grpo_rl.data.group import Group

Ids = Integer[np.ndarray, "_"]
"""Tokens of a sequence, or their places; each sequence has a length of its own."""


@dataclass(eq=False)
class Branch:
    """Tokens from ``start`` up to ``stop`` of all ``members``, which are equal up to there.

    Args:
        members: indices of sequences, in ascending order.
        children: branches that go on from here, in the order of their first members.
    """

    start: int
    stop: int
    members: list[int]
    children: list[Branch] = field(default_factory=list)

    def __iter__(self) -> Iterator[Branch]:
        """The branch, then each child's whole tree."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting += reversed(branch.children)


def prefix_tree(sequences: Sequence[Ids], worth: Callable[[Branch], bool] | None = None) -> Branch:
    """The tree of the sequences; its root has no tokens, and all of them as members.

    Args:
        worth: True if several sequences' common tokens become a branch; those of a refused branch are left to
            each of its children. It reads all but ``children``. None: all do.

    >>> root = prefix_tree([np.array(ids) for ids in ([1, 2, 3], [1, 2, 4, 5], [7], [1, 2, 3])])
    >>> [(branch.start, branch.stop, branch.members) for branch in root if branch.stop]
    [(0, 2, [0, 1, 3]), (2, 3, [0, 3]), (2, 4, [1]), (0, 1, [2])]
    """
    root = Branch(0, 0, list(range(len(sequences))))
    # Sorted, the sequences that begin alike lie side by side; bytes in this order sort as the numbers do.
    keys = [ids.astype(">u4").tobytes() for ids in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    shared = [common_length(sequences[a], sequences[b]) for a, b in zip(order, order[1:], strict=False)]
    waiting = [(root, 0, len(order))]
    while waiting:
        parent, first, last = waiting.pop()
        borders = shared[first : last - 1]
        stop = min(borders) if borders else len(sequences[order[first]]) if first < last else 0
        branch = Branch(parent.stop, stop, sorted(order[first:last]))
        if stop > parent.stop and (not borders or worth is None or worth(branch)):
            parent.children.append(branch)
            parent = branch
        if borders:
            cuts = [first, *(first + i + 1 for i, length in enumerate(borders) if length == stop), last]
            waiting += [(parent, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    for branch in root:
        branch.children.sort(key=lambda child: child.members)
    return root


def common_length(a: Ids, b: Ids) -> int:
    """The number of tokens that two sequences begin with in common."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


LEAST_SHARED = 32
"""Tokens that all prompts begin with, to be counted once a micro-batch; fewer may be computed for each group."""


@dataclass(frozen=True)
class MicroBatching:
    """Settings that split an optimizer step's groups into micro-batches, and weight their tokens in the loss.

    Args:
        max_tokens: tokens of a micro-batch, prompts counted once. Where responses have over 32 times the tokens that
            all prompts share, it may be 3 % more: sharing would cost more than it saves (`grpo_rl.policies.packing`).
        count: exactly this many micro-batches in each process instead.
        aggregate: how tokens are weighted in the loss, see `grpo_rl.losses.aggregate.token_weights`.
        skip_zero_advantage: leave out zero-variance groups. They still count in the step's mean; without a KL, an
            entropy term and one of the surrogate's for all tokens their gradient is zero.
        mask_truncated: leave responses that reached the length limit out of the loss.
        top_entropy_fraction: only this share of the step's trained tokens, those of highest entropy, carries the policy
            gradient; KL and entropy terms apply to all.
        covariance: the window of `grpo_rl.losses.covariance.Covariance`, for surrogates that choose tokens by it.
        on_policy: this is the only optimizer step on these groups, so the log-probabilities computed now are also those
            before the update, and no group needs ``old_log_probs``.
    """

    max_tokens: int
    count: int | None = None
    aggregate: str | Callable[..., Tensor] = "sequence_mean"
    skip_zero_advantage: bool = False
    mask_truncated: bool = False
    top_entropy_fraction: float = 1.0
    covariance: tuple[float, float] | None = None
    on_policy: bool = False


@runtime_checkable
class RankInfo(Protocol):
    """A training process: its rank, the number of ranks, and whether all must run the same number of forward passes."""

    rank: int
    size: int
    in_step: bool


def groups_to_score(groups: Sequence[Group], skip_zero_advantage: bool, mask_truncated: bool = False) -> list[Group]:
    """The groups that training computes: those with a trained token and, if asked for, a non-zero advantage.

    Args:
        groups: with advantages, unless all are wanted.
        skip_zero_advantage: leave out zero-variance groups.
        mask_truncated: responses that reached the length limit are not trained on.
    """
    return [
        group
        for group in groups
        if group.trained_tokens(mask_truncated).any() and (not skip_zero_advantage or bool(torch.any(group.advantages)))
    ]


def micro_batches(groups: Sequence[Group], max_tokens: int, count: int | None = None) -> list[list[Group]]:
    """The groups split into micro-batches of balanced cost, each within ``max_tokens`` where its groups allow it.

    The largest group goes first, into the lightest micro-batch (Graham's LPT rule). A group larger than the budget has
    a micro-batch of its own.

    Args:
        max_tokens: tokens computed at a time: prompts count once, and what all prompts begin with once a micro-batch.
        count: exactly this many micro-batches instead, or as many as there are groups.

    >>> from grpo_rl.testing import random_group
    >>> groups = [random_group(prompt=2, lengths=[n], group_id=n) for n in (8, 3, 4)]
    >>> [[g.group_id for g in micro] for micro in micro_batches(groups, max_tokens=12)]
    [[8], [4, 3]]
    """
    shared = shared if (shared := shared_prompt(groups)) >= LEAST_SHARED else 0
    total = sum(group.num_tokens - shared for group in groups)
    size = count or max(1, -(-total // max(1, max_tokens - shared)))
    ordered = sorted(groups, key=lambda group: group.num_tokens, reverse=True)
    while True:
        bins: list[list[Group]] = [[] for _ in range(min(size, len(groups)))]
        loads = [shared] * len(bins)
        for group in ordered:
            lightest = loads.index(min(loads))
            bins[lightest].append(group)
            loads[lightest] += group.num_tokens - shared
        fits = all(load <= max_tokens or len(b) == 1 for b, load in zip(bins, loads, strict=True))
        if fits or count is not None:
            return bins
        size += 1


def shared_prompt(groups: Sequence[Group]) -> int:
    """The number of tokens that all prompts begin with in common.

    >>> from grpo_rl.testing import random_group
    >>> shared_prompt([random_group(prompt=5, lengths=[2]), random_group(prompt=3, lengths=[2])]), shared_prompt([])
    (3, 0)
    """
    prompts = [group.prompt_ids.numpy() for group in groups]
    return min((common_length(prompts[0], prompt) for prompt in prompts), default=0)


def micro_batches_of(
    rank: RankInfo | None, groups: Sequence[Group], max_tokens: int, count: int | None = None
) -> tuple[list[list[Group]], int]:
    """This process's micro-batches of the groups, and how many of them it owns.

    Every process computes the same split and takes every ``size``-th micro-batch, so loads are balanced. Where all
    processes must run the same number of forwards, those with fewer score the smallest group again, with zero weight.

    Args:
        rank: which of the processes this is; None for a single process.
        count: exactly this many micro-batches in each process instead, as far as there are groups.

    Three groups for two processes:

    >>> from types import SimpleNamespace
    >>> from grpo_rl.testing import random_group
    >>> groups = [random_group(prompt=2, lengths=[n], group_id=n) for n in (8, 3, 4)]
    >>> for rank in range(2):
    ...     micros, owned = micro_batches_of(SimpleNamespace(rank=rank, size=2, in_step=True), groups, max_tokens=10)
    ...     print([[g.group_id for g in micro] for micro in micros], owned)
    [[8], [3]] 2
    [[4], [3]] 1
    """
    if not groups:
        return [], 0
    if rank is None:
        micros = micro_batches(groups, max_tokens, count and min(count, len(groups)))
        return micros, len(micros)
    each = count or -(-len(micro_batches(groups, max_tokens)) // rank.size)
    micros = micro_batches(groups, max_tokens, min(each * rank.size, len(groups)))
    owned = micros[rank.rank :: rank.size]
    longest = -(-len(micros) // rank.size)
    smallest = min(groups, key=lambda group: group.num_tokens)
    return owned + [[smallest]] * (longest - len(owned) if rank.in_step else 0), len(owned)


def by_group(tokens: TensorDictBase, values: Shaped[Tensor, "*K N"]) -> dict[int, Shaped[Tensor, "*K R"]]:
    """Values of a micro-batch's N tokens on the CPU, by the id of the group whose R tokens they are of.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> tokens = TensorDict(group_id=torch.tensor([7, 7, 2]), batch_size=[3])
    >>> by_group(tokens, torch.tensor([0.5, 1.0, 2.0]))
    {7: tensor([0.5000, 1.0000]), 2: tensor([2.])}
    """
    ids, sizes = torch.unique_consecutive(tokens["group_id"].cpu(), return_counts=True)
    return dict(zip(ids.tolist(), values.detach().cpu().split(sizes.tolist(), dim=-1), strict=True))
