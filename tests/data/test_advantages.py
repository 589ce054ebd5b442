"""Advantages: tables worked out by hand, and what must hold for every group and every collection."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.turns import turn_advantages
from grpo_rl.losses.advantage import batch_advantages, group_advantages
from grpo_rl.testing import random_group
from grpo_rl.training.micro_batches import training_tensordict

GROUP_KINDS = ("zscore", "no_std", "leave_one_out")
BATCH_KINDS = ("batch_std", "batch_zscore", "multi_reward")
REWARDS = st.lists(st.integers(-4, 12).map(lambda quarter: quarter / 4), min_size=2, max_size=16)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Rewards 0, 0, 2, 3: mean 5/4; deviations -5/4, -5/4, 3/4, 7/4; squares 25 + 25 + 9 + 49 = 108 sixteenths;
        # unbiased variance 108/16/3 = 9/4, std 3/2.
        ("zscore", [-1.25 / 1.5001, -1.25 / 1.5001, 0.75 / 1.5001, 1.75 / 1.5001]),
        ("no_std", [-1.25, -1.25, 0.75, 1.75]),
        # 0 - 5/3, 0 - 5/3, 2 - 3/3, 3 - 2/3
        ("leave_one_out", [-5 / 3, -5 / 3, 1.0, 7 / 3]),
        ("maxrl", [-1.0, -1.0, 0.6, 1.4]),  # over 5/4
    ],
)
def test_advantages_match_the_table_worked_out_by_hand(kind, expected):
    got = group_advantages(torch.tensor([0.0, 0.0, 2.0, 3.0], dtype=torch.float64), kind)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@given(REWARDS, st.sampled_from(GROUP_KINDS))
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards, kind):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(rewards, kind)
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-9)
    order = rewards.argsort()
    assert (advantages[order].diff() >= 0).all()


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 17), st.sampled_from(GROUP_KINDS))
def test_equal_rewards_give_exact_zeros(reward, size, kind):
    assert group_advantages(torch.full((size,), reward), kind).eq(0).all()


# Two groups of two and one of three responses.
TABLES = [torch.tensor([[0.0, 2.0], [4.0, 4.0]], dtype=torch.float64), torch.tensor([[1.0, 1.0, 4.0]]).double()]
DEVIATIONS = torch.tensor([-1.0, 1.0, 0.0, 0.0, -1.0, -1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "variance"),
    [
        # Rewards 0, 2, 4, 4, 1, 1, 4: mean 16/7, sum of squares 54, so (54 - 256/7) / 6 = 122/42.
        ("batch_std", 122 / 42),
        # Differences from the groups' means, mean 0: squares 1 + 1 + 1 + 1 + 4 = 8, over 6.
        ("batch_zscore", 8 / 6),
    ],
)
def test_advantages_of_a_collection_match_the_table_worked_out_by_hand(kind, variance):
    got = torch.cat([table.flatten() for table in batch_advantages(TABLES, kind)])
    torch.testing.assert_close(got, DEVIATIONS / (variance**0.5 + 1e-4), rtol=1e-12, atol=0)


def test_a_part_that_some_responses_lack_is_normalised_z_scores_where_present():
    # Part a of the first group is 2 and 0 of two responses: +-z; b is -1, 0 and 1 of all three, whose std is 1: sums
    # -1, z and 1 - z. In the second group no response has a, and one has b, which has nothing to compare with.
    nan, z = math.nan, 2**-0.5
    parts = {
        "a": torch.tensor([[nan, 2.0, 0.0], [nan, nan, nan]]).double(),
        "b": torch.tensor([[-1.0, 0.0, 1.0], [nan, 7.0, nan]]).double(),
    }
    (got,) = batch_advantages([torch.zeros(2, 3).double()], "multi_reward", parts=[parts])
    sums = torch.tensor([[-1.0, z, 1 - z], [0.0, 0.0, 0.0]]).double()
    torch.testing.assert_close(got, sums / sums.std(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", GROUP_KINDS + BATCH_KINDS)
def test_a_clip_bounds_advantages_and_leaves_the_others(kind):
    rewards = [torch.tensor([[0.0, 2.0], [4.0, 3.5]]).double(), torch.tensor([[1.0, 1.25, 4.0]]).double()]
    parts = [{"a": table / 4, "b": table**2} for table in rewards]
    free, clipped = (batch_advantages(rewards, kind, bound, parts) for bound in (None, 0.8))
    assert max(float(table.abs().max()) for table in free) > 0.8
    for a, b in zip(free, clipped, strict=True):
        assert torch.equal(b, a.clamp(-0.8, 0.8))


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_groups_of_any_sizes_get_the_advantages_each_would_get_alone_to_the_last_bit(kind):
    rewards = [torch.randn(size) for size in (8, 2, 8, 3, 16, 8, 2) for _ in range(9)]
    rewards[4] = torch.full((8,), 0.1)  # rounding of its mean must leave no residue
    groups = [random_group(lengths=[1] * len(r), group_id=i, rewards=r.tolist(), seed=i) for i, r in enumerate(rewards)]
    for i, (before, after) in enumerate(zip(groups, AdvantageEstimator(kind)(groups), strict=True)):
        assert after.group_id == i and after.response_ids is before.response_ids
        assert before.advantages is None
        assert torch.equal(after.advantages, group_advantages(before.rewards, kind))
    assert replace(after, ref_log_probs=before.log_probs).advantages is after.advantages  # a whole Group


def test_a_kl_penalty_in_the_reward_moves_advantages_and_leaves_rewards_as_the_task_gave_them():
    # Three tokens in two responses, and a tool's token that does not count. KL by k1: (-1 + 2) + (-1 + 1.5) = 1.5 and
    # -3 + 2 = -1; at a coefficient of 2 the rewards 1, 0 become -2, 2.
    group = replace(
        random_group(lengths=[3, 1], rewards=[1.0, 0.0]),
        trainable=torch.tensor([True, True, False, True]),
        old_log_probs=torch.tensor([-1.0, -1.0, -9.0, -3.0]),
        ref_log_probs=torch.tensor([-2.0, -1.5, -1.0, -2.0]),
    )
    estimator = AdvantageEstimator("no_std", kl_coef=2.0)
    (penalised,) = estimator([group])
    assert penalised.advantages.tolist() == [-2.0, 2.0] and penalised.rewards.tolist() == [1.0, 0.0]


def with_parts(i, **parts):
    """A group with these parts of its responses' rewards."""
    parts = {name: torch.tensor(values) for name, values in parts.items()}
    size = len(next(iter(parts.values())))
    return replace(random_group(group_id=i, lengths=[1] * size, rewards=[0.0] * size), reward_parts=parts)


def test_parts_of_the_reward_get_z_scores_of_their_own_with_groups_of_different_sizes():
    # The z-scores of two responses are +-1/sqrt(2) whatever the part's scale, and the sums with weights 1 and 3 of the
    # first group +-2/sqrt(2) (the parts disagree), of the second +-4/sqrt(2), the third 0.
    estimator = AdvantageEstimator("multi_reward", reward_weights={"b": 3.0})
    values = [([100.0, 0.0], [0.0, 1.0]), ([0.0, 1.0], [0.0, 1.0]), ([0.5] * 3, [0.0] * 3)]
    groups = [with_parts(i, a=a, b=b) for i, (a, b) in enumerate(values)]
    sums = torch.tensor([-2.0, 2.0, -4.0, 4.0, 0.0, 0.0, 0.0]) / 2**0.5
    got = torch.cat([group.advantages for group in estimator(groups)])
    torch.testing.assert_close(got, sums / sums.std(), rtol=1e-3, atol=0)


def test_a_part_that_a_whole_group_or_all_of_them_lack_adds_nothing():
    groups = [with_parts(0, a=[0.0, 1.0]), with_parts(1, b=[1.0, 0.0])]
    got = AdvantageEstimator("multi_reward", reward_weights={"b": 2.0, "c": 5.0})(groups)
    sums = torch.tensor([-1.0, 1.0, 2.0, -2.0]) / 2**0.5
    torch.testing.assert_close(torch.cat([g.advantages for g in got]), sums / sums.std(), rtol=1e-3, atol=0)


def test_rewards_are_clipped_before_they_become_advantages():
    (group,) = AdvantageEstimator("no_std", reward_clip=1.0)([random_group(rewards=[-9.0, 9.0])])
    assert group.advantages.tolist() == [-1.0, 1.0] and group.rewards.tolist() == [-9.0, 9.0]


def test_an_own_function_asks_for_groups_or_for_the_collection_and_returns_a_list_as_it():
    def both(rewards, parts):
        return rewards

    def first(tables):
        return tables[:1]

    with pytest.raises(ValueError, match="asks for rewards, of each group by itself, and for parts"):
        AdvantageEstimator(both)
    with pytest.raises(ValueError, match=r"first returned tensors of shapes \[\[2, 2\]\]; return a list of .*\[1, 3\]"):
        batch_advantages([torch.zeros(2, 2), torch.zeros(1, 3)], first)


def test_credit_by_turn_is_added_to_the_responses_and_reaches_the_tokens_that_are_trained():
    # Replies 9 and 8: the first turns are compared, and the second ones of the first and third response.
    group = random_group(lengths=[3, 3, 3], rewards=[1.0, 0.0, 0.0])
    replied = torch.tensor([True, False, True] * 3)
    group = replace(group, response_ids=torch.tensor([1, 9, 2, 3, 8, 4, 5, 9, 6]), trainable=replied)
    [found] = AdvantageEstimator("no_std", turn_credit=2.0, turn_discount=0.5)([group])
    # By hand: deviations 2/3, -1/3, -1/3; of the first turns 1/3, -1/6, -1/6; of the second 1/2, none, -1/2.
    third = torch.tensor([2.0, -1.0, -1.0]) / 3
    expected = third.repeat_interleave(3) + 2 * torch.tensor([1 / 3, 0, 1 / 2, -1 / 6, 0, 0, -1 / 6, 0, -1 / 2])
    torch.testing.assert_close(found.advantages, third)
    torch.testing.assert_close(found.token_advantages, expected)
    # Rewards clipped to a half have half of both, and their sum is clipped like the response's.
    [bounded] = AdvantageEstimator("no_std", 0.25, reward_clip=0.5, turn_credit=2.0, turn_discount=0.5)([group])
    halves = (third / 2).clamp(max=0.25).repeat_interleave(3) + (expected - third.repeat_interleave(3)) / 2
    torch.testing.assert_close(bounded.token_advantages, halves.clamp(-0.25, 0.25))
    tokens = training_tensordict([found], torch.ones(9), torch.zeros(9), torch.zeros(9))
    torch.testing.assert_close(tokens["advantage"], expected)
    assert torch.equal(found.with_only([2]).token_advantages, found.token_advantages[6:])
    # Rewards of the turns instead: returns 0 + 2/2, 4 + 0, 0 + 0 of the first turns, 2 and 0 of the second.
    of_turns = {
        "a/turn_reward_0": torch.tensor([0.0, 4.0, math.nan]),
        "a/turn_reward_1": torch.tensor([2.0, math.nan, 0.0]),
    }
    given = turn_advantages(replace(group, measures=of_turns), group.rewards, 0.5, "no_std")
    torch.testing.assert_close(given, torch.tensor([-2 / 3, 0, 1, 7 / 3, 0, 0, -5 / 3, 0, -1]))
    with pytest.raises(ValueError, match="loss.turn_credit"):
        AdvantageEstimator("batch_std", turn_credit=1.0)
