"""The buffer hands every group out exactly once an epoch."""

import os

import pytest
import torch

from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.testing import random_group
from tests.helpers import left_if_killed


def filled(groups=6, per_batch=2):
    buffer = GroupBuffer(groups, per_batch)
    buffer.extend([random_group(group_id=i, rewards=[0.0, float(i)]) for i in range(groups)])
    return buffer


def test_a_process_that_is_killed_leaves_nothing_of_its_buffer_in_shared_memory():
    before = left_if_killed(os.getpid())
    buffer = filled()
    assert left_if_killed(os.getpid()) <= before
    del buffer


@pytest.mark.parametrize(("per_batch", "sizes"), [(2, [2, 2, 2]), (4, [4, 2])])  # the last batch may be smaller
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_group_comes_exactly_once_an_epoch(per_batch, sizes, epochs):
    batches = list(filled(6, per_batch).batches(epochs))
    assert [len(batch) for batch in batches] == sizes * epochs
    for epoch in range(epochs):
        own = batches[len(sizes) * epoch : len(sizes) * (epoch + 1)]
        assert sorted(group.group_id for batch in own for group in batch) == list(range(6))


def test_a_drained_buffer_starts_anew():
    buffer = filled()
    next(iter(buffer.batches()))  # left in the middle of an epoch
    assert len(buffer.drain()) == 6 and len(buffer) == 0
    for ids in ([10, 11], [12], [13]):
        buffer.extend([random_group(group_id=i) for i in ids])
    assert [group.group_id for group in buffer[:]] == [10, 11, 12, 13]
    assert sorted(g.group_id for batch in buffer.batches() for g in batch) == [10, 11, 12, 13]


def test_the_order_is_random_and_repeats_under_a_seed():
    def order(seed):
        torch.manual_seed(seed)
        return [g.group_id for batch in filled(32, 4).batches() for g in batch]

    assert order(0) == order(0) != order(1)


def test_groups_that_would_overwrite_others_are_refused():
    with pytest.raises(ValueError, match="1 groups do not fit: 0 of 6 places are free"):
        filled().extend([random_group()])
