"""GroupBuffer: a TorchRL replay buffer whose items are complete groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchrl.data import ListStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from grpo_rl.advantages import group_advantages
from grpo_rl.rollout import Group


class GroupBuffer(ReplayBuffer):
    """Holds groups, writes their advantages as they come in, and hands each out once an epoch.

    Args:
        max_groups: capacity.
        groups_per_batch: groups of one optimizer step.
        advantage: kind of advantage, see `grpo_rl.advantages.group_advantages`.
    """

    def __init__(self, max_groups: int, groups_per_batch: int, advantage: str = "zscore") -> None:
        super().__init__(
            storage=ListStorage(max_groups),
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
        return super().extend([g.with_advantages(group_advantages(g.rewards, self._advantage)) for g in groups])

    def batches(self, epochs: int = 1) -> Iterator[list[Group]]:
        """Batches of groups in random order, every group exactly ``epochs`` times.

        Raises:
            ValueError: the groups held do not divide into batches.
        """
        if len(self) % self._batch_size:
            raise ValueError(f"{len(self)} groups do not divide into batches of {self._batch_size}")
        for _ in range(epochs * len(self) // self._batch_size):
            yield self.sample()

    def drain(self) -> list[Group]:
        """All groups held, which leave the buffer."""
        groups = list(self[:])
        self.empty()
        return groups
