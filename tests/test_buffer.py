"""The buffer writes advantages and hands every group out exactly once an epoch."""

from __future__ import annotations

import pytest
import torch
from torchrl.data import ReplayBuffer

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


def test_groups_that_do_not_divide_into_batches_are_refused():
    with pytest.raises(ValueError, match="6 groups do not divide into batches of 4"):
        list(filled(6, 4).batches())


def test_groups_that_would_overwrite_others_are_refused():
    with pytest.raises(ValueError, match="1 groups do not fit: 0 of 6 places are free"):
        filled().extend([random_group()])
