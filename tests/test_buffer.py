"""The buffer writes advantages and hands every group out exactly once an epoch."""

from __future__ import annotations

import math

import pytest
import torch
from torchrl.data import ReplayBuffer

from grpo_rl.advantages import group_advantages
from grpo_rl.buffer import GroupBuffer
from grpo_rl.testing import random_group


def filled(groups=6, per_batch=2, **kwargs):
    buffer = GroupBuffer(groups, per_batch, **kwargs)
    buffer.extend([random_group(group_id=i, rewards=[0.0, float(i)]) for i in range(groups)])
    return buffer


def test_it_is_a_torchrl_replay_buffer():
    assert isinstance(filled(), ReplayBuffer) and len(filled()) == 6


def test_advantages_are_written_when_groups_come_in():
    groups = filled(advantage="no_std").drain()
    assert [g.advantages.tolist() for g in groups] == [[-i / 2, i / 2] for i in range(6)]


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_group_comes_exactly_once_an_epoch(epochs):
    batches = list(filled().batches(epochs))
    assert [len(batch) for batch in batches] == [2] * 3 * epochs
    for epoch in range(epochs):
        ids = [g.group_id for batch in batches[3 * epoch : 3 * epoch + 3] for g in batch]
        assert sorted(ids) == list(range(6))


def test_a_drained_buffer_starts_anew():
    buffer = filled()
    next(iter(buffer.batches()))  # left in the middle of an epoch
    assert len(buffer.drain()) == 6 and len(buffer) == 0
    buffer.extend([random_group(group_id=i) for i in range(10, 14)])
    assert sorted(g.group_id for batch in buffer.batches() for g in batch) == [10, 11, 12, 13]


def test_the_order_is_random_and_repeats_under_a_seed():
    def order(seed):
        torch.manual_seed(seed)
        return [g.group_id for batch in filled(32, 4).batches() for g in batch]

    assert order(0) == order(0) != order(1)


def test_where_groups_do_not_divide_the_last_batch_of_an_epoch_is_smaller():
    batches = list(filled(6, 4).batches(epochs=2))
    assert [len(batch) for batch in batches] == [4, 2, 4, 2]
    for epoch in (batches[:2], batches[2:]):
        assert sorted(group.group_id for batch in epoch for group in batch) == list(range(6))


def test_groups_that_would_overwrite_others_are_refused():
    with pytest.raises(ValueError, match="1 groups do not fit: 0 of 6 places are free"):
        filled().extend([random_group()])


@pytest.mark.parametrize("kind", ["zscore", "no_std", "leave_one_out"])
def test_groups_of_any_sizes_get_the_advantages_each_would_get_alone_to_the_last_bit(kind):
    rewards = [torch.randn(size) for size in (8, 2, 8, 3, 16, 8, 2) for _ in range(9)]
    rewards[4] = torch.full((8,), 0.1)  # rounding of its mean must leave no residue
    groups = [random_group(lengths=[1] * len(r), group_id=i, rewards=r.tolist(), seed=i) for i, r in enumerate(rewards)]
    buffer = GroupBuffer(len(groups), 1, kind)
    buffer.extend(groups)
    for i, (before, after) in enumerate(zip(groups, buffer.drain(), strict=True)):
        assert after.group_id == i and after.response_ids is before.response_ids
        assert before.advantages is None
        assert torch.equal(after.advantages, group_advantages(before.rewards, kind))
    assert after.with_ref_log_probs(before.log_probs).advantages is after.advantages  # a whole Group


@pytest.mark.parametrize(
    ("rewards", "kind", "message"),
    [
        ([[0.0, 1.0], [0.0, math.nan]], "zscore", r"finite, got \[0.0, nan\]"),
        ([[0.0, 1.0], [1.0]], "zscore", "a group of 1 has no siblings"),
        ([[0.0, 1.0]], "z", "unknown advantage 'z'"),
    ],
)
def test_rewards_that_give_no_advantage_are_refused_and_leave_the_buffer_as_it_was(rewards, kind, message):
    buffer = GroupBuffer(4, 1, kind)
    with pytest.raises(ValueError, match=message):
        buffer.extend([random_group(lengths=[1] * len(r), rewards=r) for r in rewards])
    assert len(buffer) == 0


def test_groups_that_come_in_several_times_stay_in_order():
    buffer = GroupBuffer(5, 1)
    for ids in ([0, 1], [2], [3, 4]):
        buffer.extend([random_group(group_id=i) for i in ids])
    assert [group.group_id for group in buffer[:]] == [0, 1, 2, 3, 4]


def test_one_group_is_stored_like_several():
    buffer = GroupBuffer(1, 1, "no_std")
    buffer.add(random_group(rewards=[0.0, 3.0]))
    assert buffer[0].advantages.tolist() == [-1.5, 1.5]


def test_a_group_can_be_read_by_its_place():
    buffer = filled(advantage="no_std")
    assert buffer[3].group_id == 3 and buffer[3].advantages.tolist() == [-1.5, 1.5]
