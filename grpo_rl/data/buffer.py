"""GroupBuffer: a TorchRL replay buffer whose items are complete groups. Letters: N groups of one size, G responses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.data import ListStorage, ReplayBuffer, RoundRobinWriter
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from grpo_rl.data.advantages import Kind, batch_advantages, check_advantage, kl_penalty
from grpo_rl.data.group import Group
from grpo_rl.losses.kl import KL


class GroupBuffer(ReplayBuffer):
    """Holds groups, writes their advantages as they come in, and hands each out once an epoch.

    Args:
        max_groups: capacity.
        groups_per_batch: groups of one optimizer step.
        advantage: kind of advantage, see `grpo_rl.data.advantages.batch_advantages`; what it calls a batch is what one
            :meth:`extend` brings, a collection.
        advantage_clip: largest advantage either way.
        reward_weights: of the parts of the reward, for ``advantage=multi_reward``.
        kl_coef: of the KL from the reference that each answer's reward is charged with, before advantages.
        kl: the estimate of it, see `grpo_rl.data.advantages.kl_penalty`.
        reward_clip: rewards are first held within plus and minus this.
        reward_scale: and then multiplied by this.

    Raises:
        ValueError: the settings give no advantage.
    """

    def __init__(
        self,
        max_groups: int,
        groups_per_batch: int,
        advantage: Kind = "zscore",
        advantage_clip: float | None = None,
        reward_weights: Mapping[str, float] | None = None,
        kl_coef: float = 0.0,
        kl: KL = "k1",
        reward_clip: float | None = None,
        reward_scale: float = 1.0,
    ) -> None:
        check_rewards(reward_clip, reward_scale)
        check_advantage(advantage, advantage_clip, kl_coef, kl)
        if advantage == "multi_reward" and (reward_clip is not None or reward_scale != 1):
            raise ValueError(
                "loss.advantage=multi_reward looks at parts of the reward, not at their sum; leave "
                "train.reward_clip at null and train.reward_scale at 1"
            )
        super().__init__(
            # As if to be compiled: TorchRL counts in plain numbers then. Its other counters have locks that processes
            # share, whose semaphores may stay in /dev/shm when the run is killed.
            storage=_GroupStorage(max_groups, compilable=True),
            writer=RoundRobinWriter(compilable=True),
            sampler=SamplerWithoutReplacement(),
            batch_size=groups_per_batch,
            collate_fn=list,
        )
        self._max_groups = max_groups
        self._advantage = {"kind": advantage, "clip": advantage_clip, "weights": reward_weights}
        self.kl_coef, self.kl = kl_coef, kl
        self._reward_clip, self._reward_scale = math.inf if reward_clip is None else reward_clip, reward_scale

    def extend(self, groups: Sequence[Group]) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Stores groups with their advantages.

        Raises:
            ValueError: they do not fit; the storage is a ring, and would overwrite groups that wait to be trained on.
        """
        room = self._max_groups - len(self)
        if len(groups) > room:
            raise ValueError(f"{len(groups)} groups do not fit: {room} of {self._max_groups} places are free")
        return super().extend(self._beside_advantages(groups))

    def _beside_advantages(self, groups: Sequence[Group]) -> list[_Item]:
        """The groups beside their advantages, which are computed for all groups of one size at once."""
        by_size: dict[int, list[int]] = defaultdict(list)
        for i, group in enumerate(groups):
            by_size[group.size].append(i)
        rewards = [self._charged([groups[i] for i in members]) for members in by_size.values()]
        parts = []
        if self._advantage["kind"] == "multi_reward":
            parts = [_stacked([groups[i].reward_parts for i in members]) for members in by_size.values()]
        tables = batch_advantages(rewards, **self._advantage, parts=parts)
        items: dict[int, _Item] = {}
        for members, table in zip(by_size.values(), tables, strict=True):
            items |= {i: (groups[i], table, row) for row, i in enumerate(members)}
        return [items[i] for i in range(len(groups))]

    def _charged(self, groups: Sequence[Group]) -> Tensor:
        """Rewards within bounds and scaled, less what their KL costs; ``Group.rewards`` stay what the task gave."""
        rewards = torch.stack([group.rewards for group in groups])
        rewards = rewards.clamp(-self._reward_clip, self._reward_clip) * self._reward_scale
        if not self.kl_coef:
            return rewards
        return rewards - self.kl_coef * torch.stack([kl_penalty(group, self.kl) for group in groups])

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


def check_rewards(clip: float | None, scale: float) -> None:
    """Raises ValueError unless rewards can be clipped and scaled so."""
    if (clip is not None and not clip > 0) or not 0 < scale < math.inf:
        raise ValueError(
            f"train.reward_clip={clip}, train.reward_scale={scale}; both must be more than 0, and a clip of null clips "
            "nothing"
        )


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


def _stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def _read(item: _Item) -> Group:
    group, advantages, row = item
    return group.with_advantages(advantages[row])
