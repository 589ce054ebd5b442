"""GroupBuffer: a TorchRL replay buffer whose items are complete groups."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.data import ListStorage, ReplayBuffer, RoundRobinWriter
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from grpo_rl.data.group import Group


class GroupBuffer(ReplayBuffer):
    """Stores up to ``num_groups`` groups, those of a collection, and hands each out once an epoch."""

    def __init__(self, num_groups: int, groups_per_batch: int) -> None:
        super().__init__(
            # As if to be compiled: TorchRL counts in plain numbers then. Its other counters have locks that processes
            # share, whose semaphores may stay in /dev/shm when the run is killed.
            storage=_GroupStorage(num_groups, compilable=True),
            writer=RoundRobinWriter(compilable=True),
            sampler=SamplerWithoutReplacement(),
            batch_size=groups_per_batch,
            collate_fn=list,
        )
        self._num_groups = num_groups

    def extend(self, groups: Sequence[Group]) -> object:
        """Stores the groups.

        Raises:
            ValueError: they do not fit; the storage is a ring, and would overwrite groups that wait to be trained on.
        """
        free = self._num_groups - len(self)
        if len(groups) > free:
            raise ValueError(f"{len(groups)} groups do not fit: {free} of {self._num_groups} places are free")
        return super().extend(groups)

    def add(self, data: Group) -> object:
        """Stores one group, as :meth:`extend` stores several."""
        return self.extend([data])

    def batches(self, epochs: int = 1) -> Iterator[list[Group]]:
        """Batches of groups in random order, every group exactly ``epochs`` times.

        An epoch's last batch is smaller if the number of groups is no multiple of the batch size, as after dropped
        groups.
        """
        for _ in range(epochs * -(-len(self) // self._batch_size)):
            yield self.sample()

    def drain(self) -> list[Group]:
        """Removes all groups from the buffer and returns them."""
        groups = list(self[:])
        self.empty()
        return groups


class _GroupStorage(ListStorage):
    """A list of groups that is extended in one call."""

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        end = len(self)
        # TorchRL would take a lock for each item.
        if isinstance(cursor, Tensor) and torch.equal(cursor, torch.arange(end, end + len(cursor))):
            cursor = slice(end, None)
        super().set(cursor, data, set_cursor=set_cursor)
