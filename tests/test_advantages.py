"""Group advantages: tables worked out by hand, and what must hold for every group."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_rl.advantages import group_advantages

KINDS = ("zscore", "no_std", "leave_one_out")
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
    ],
)
def test_advantages_match_the_table_worked_out_by_hand(kind, expected):
    got = group_advantages(torch.tensor([0.0, 0.0, 2.0, 3.0], dtype=torch.float64), kind)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@given(REWARDS, st.sampled_from(KINDS))
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards, kind):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(rewards, kind)
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-9)
    order = rewards.argsort()
    assert (advantages[order].diff() >= 0).all()


@given(REWARDS, st.sampled_from(KINDS), st.floats(-8, 8))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, kind, constant):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    shifted = group_advantages(rewards + constant, kind)
    torch.testing.assert_close(shifted, group_advantages(rewards, kind), rtol=1e-9, atol=1e-9)


@given(REWARDS)
def test_the_z_score_hardly_depends_on_the_scale_of_the_rewards(rewards):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    assume(rewards.std() > 0.05)
    # std is at least 0.05, so the 1e-4 beside it moves a z-score by less than 0.2 %.
    torch.testing.assert_close(group_advantages(rewards * 100), group_advantages(rewards), rtol=3e-3, atol=0)


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 17), st.sampled_from(KINDS))
def test_equal_rewards_give_exact_zeros(reward, size, kind):
    assert group_advantages(torch.full((size,), reward), kind).eq(0).all()


@pytest.mark.parametrize("size", [0, 1])
def test_a_group_without_siblings_is_refused(size):
    with pytest.raises(ValueError, match=f"a group of {size} has no siblings .* at least 2"):
        group_advantages(torch.ones(size))


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="rewards must be finite"):
        group_advantages(torch.tensor([0.0, reward]))


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown advantage 'z'; choose one of zscore, no_std, leave_one_out"):
        group_advantages(torch.tensor([0.0, 1.0]), "z")
