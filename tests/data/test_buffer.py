"""The buffer writes advantages and hands every group out exactly once an epoch."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from torchrl.data import ReplayBuffer

from grpo_rl.data.advantages import group_advantages
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.testing import left_if_killed, random_group


def filled(groups=6, per_batch=2, **kwargs):
    buffer = GroupBuffer(groups, per_batch, **kwargs)
    buffer.extend([random_group(group_id=i, rewards=[0.0, float(i)]) for i in range(groups)])
    return buffer


def test_it_is_a_torchrl_replay_buffer():
    assert isinstance(filled(), ReplayBuffer) and len(filled()) == 6


def test_a_process_that_is_killed_leaves_nothing_of_its_buffer_in_shared_memory():
    before = left_if_killed(os.getpid())
    buffer = filled()
    assert left_if_killed(os.getpid()) <= before
    del buffer


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
        ([[0.0, 1.0]], "multi_reward", "the rewards have the parts \\[\\]"),
    ],
)
def test_rewards_that_give_no_advantage_are_refused_and_leave_the_buffer_as_it_was(rewards, kind, message):
    buffer = GroupBuffer(4, 1, kind)
    with pytest.raises(ValueError, match=message):
        buffer.extend([random_group(lengths=[1] * len(r), rewards=r) for r in rewards])
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "z"}, "unknown advantage 'z'"),
        ({"advantage_clip": 0.0}, "loss.advantage_clip is 0.0"),
        ({"kl_coef": 0.1, "kl": "k3_is"}, "loss.kl=k3_is differs by its gradient"),
        ({"kl_coef": 0.1, "advantage": "multi_reward"}, "use loss.kl_in=loss"),
    ],
)
def test_settings_that_give_no_advantage_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GroupBuffer(4, 1, **settings)


def test_the_kl_in_the_reward_moves_advantages_and_leaves_rewards_as_the_task_gave_them():
    # Three tokens in two answers, and a tool's token that is not charged. KL by k1: (-1 + 2) + (-1 + 1.5) = 1.5 and
    # -3 + 2 = -1; at a coefficient of 2 the rewards 1, 0 become -2, 2.
    group = replace(
        random_group(lengths=[3, 1], rewards=[1.0, 0.0]),
        trainable=torch.tensor([True, True, False, True]),
        old_log_probs=torch.tensor([-1.0, -1.0, -9.0, -3.0]),
        ref_log_probs=torch.tensor([-2.0, -1.5, -1.0, -2.0]),
    )
    buffer = GroupBuffer(1, 1, "no_std", kl_coef=2.0)
    buffer.extend([group])
    (charged,) = buffer.drain()
    assert charged.advantages.tolist() == [-2.0, 2.0] and charged.rewards.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="write them with TrainPolicy.annotate"):
        buffer.extend([random_group()])


def test_parts_of_the_reward_get_z_scores_of_their_own_with_groups_of_different_sizes():
    # Each part is 0 and 1 somewhere in its group: the z-scores of two answers are +-1/sqrt(2), and the sums with
    # weights 1 and 3 of the first group +-2/sqrt(2) (the parts disagree), of the second +-4/sqrt(2), the third 0.
    def group(i, a, b):
        parts = {"a": torch.tensor(a), "b": torch.tensor(b)}
        return replace(random_group(group_id=i, lengths=[1] * len(a), rewards=[0.0] * len(a)), reward_parts=parts)

    buffer = GroupBuffer(3, 1, "multi_reward", reward_weights={"b": 3.0})
    buffer.extend([group(0, [1.0, 0.0], [0.0, 1.0]), group(1, [0.0, 1.0], [0.0, 1.0]), group(2, [0.5] * 3, [0.0] * 3)])
    sums = torch.tensor([-2.0, 2.0, -4.0, 4.0, 0.0, 0.0, 0.0]) / 2**0.5
    got = torch.cat([group.advantages for group in buffer.drain()])
    torch.testing.assert_close(got, sums / sums.std(), rtol=1e-3, atol=0)


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
