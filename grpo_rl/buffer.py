"""GroupBuffer: a TorchRL replay buffer whose items are complete groups. Letters: N groups of one size, G responses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.data import ListStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from grpo_rl.advantages import Kind, group_advantages
from grpo_rl.rollout import Group


class GroupBuffer(ReplayBuffer):
    """Holds groups, writes their advantages as they come in, and hands each out once an epoch.

    Args:
        max_groups: capacity.
        groups_per_batch: groups of one optimizer step.
        advantage: kind of advantage, see `grpo_rl.advantages.group_advantages`.
    """

    def __init__(self, max_groups: int, groups_per_batch: int, advantage: Kind = "zscore") -> None:
        super().__init__(
            storage=_GroupStorage(max_groups),
            sampler=SamplerWithoutReplacement(),
            batch_size=groups_per_batch,
            collate_fn=list,
        )
        self._advantage, self._max_groups = advantage, max_groups

    def extend(self, groups: Sequence[Group]) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Stores groups with their advantages.

        Raises:
            ValueError: they do not fit; the storage is a ring, and would overwrite groups that wait to be trained on.
        """
        room = self._max_groups - len(self)
        if len(groups) > room:
            raise ValueError(f"{len(groups)} groups do not fit: {room} of {self._max_groups} places are free")
        return super().extend(_beside_advantages(groups, self._advantage))

    def add(self, data: Group) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Stores one group, as :meth:`extend` stores several."""
        return self.extend([data])

    def batches(self, epochs: int = 1) -> Iterator[list[Group]]:
        """Batches of groups in random order, every group exactly ``epochs`` times.

        An epoch's last batch is smaller where the groups held do not divide: some were dropped as they were collected.
        """
        for _ in range(epochs * -(-len(self) // self._batch_size)):
            yield self.sample()

    def drain(self) -> list[Group]:
        """All groups held, which leave the buffer."""
        groups = list(self[:])
        self.empty()
        return groups


_Item = tuple[Group, Tensor, int]
"""A group, a table of advantages, and the group's row in it."""


class _GroupStorage(ListStorage):
    """A list of groups beside their advantages; a group is given its own when it is read."""

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        end = len(self)
        # What is appended goes in at once: TorchRL would take a lock for each item.
        if isinstance(cursor, Tensor) and torch.equal(cursor, torch.arange(end, end + len(cursor))):
            cursor = slice(end, None)
        super().set(cursor, data, set_cursor=set_cursor)

    def get(self, index: Any) -> Any:
        items = super().get(index)
        return _read(items) if isinstance(items, tuple) else [_read(item) for item in items]


def _read(item: _Item) -> Group:
    group, advantages, row = item
    return group.with_advantages(advantages[row])


def _beside_advantages(groups: Sequence[Group], kind: Kind) -> list[_Item]:
    """The groups beside their advantages, which are computed for all groups of one size at once."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        by_size[group.size].append(i)
    items: dict[int, _Item] = {}
    for members in by_size.values():
        advantages = group_advantages(torch.stack([groups[i].rewards for i in members]), kind)
        items |= {i: (groups[i], advantages, row) for row, i in enumerate(members)}
    return [items[i] for i in range(len(groups))]
