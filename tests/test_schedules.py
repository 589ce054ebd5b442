from __future__ import annotations

import math

import pytest

from grpo_rl.schedules import AdaptiveKL, GroupSizes, RefreshRule


def test_the_coefficient_rises_above_the_target_and_falls_below_it_by_the_clipped_error():
    kl = AdaptiveKL(1.0, target=0.1, gain=0.1)
    assert kl.update(0.3) == pytest.approx(1.02)  # error 2, clipped at 0.2
    assert kl.update(0.11) == pytest.approx(1.02 * 1.01)  # error 0.1
    assert kl.update(0.1) == pytest.approx(1.02 * 1.01)
    assert kl.update(0.0) == pytest.approx(1.02 * 1.01 * 0.98)  # error -1, clipped at -0.2


def test_a_policy_that_drifts_with_less_pull_ends_near_the_target():
    # A stationary policy whose KL is inversely proportional to the coefficient: 0.04 / coef, so 0.02 at coef = 2.
    kl = AdaptiveKL(0.1, target=0.02, gain=0.5)
    for _ in range(200):
        kl.update(0.04 / kl.coef)
    assert kl.coef == pytest.approx(2.0, rel=1e-3)


def test_without_a_target_or_with_a_kl_that_is_not_finite_the_coefficient_stays():
    assert AdaptiveKL(0.1).update(5.0) == 0.1
    kl = AdaptiveKL(0.1, target=0.02)
    assert kl.update(math.nan) == kl.update(math.inf) == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coef": 0.0, "target": 0.1}, r"policy\.target_kl=0\.1 with policy\.kl_coef=0\.0"),
        ({"coef": 0.1, "target": -1.0}, r"policy\.target_kl=-1\.0"),
        ({"coef": 0.1, "gain": 0.0}, r"policy\.kl_gain=0\.0"),
        ({"coef": 0.1, "gain": 2.0}, r"policy\.kl_gain=2\.0"),
    ],
)
def test_a_wrong_setting_of_the_kl_term_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveKL(**settings)


def test_group_sizes_hold_from_their_step_on():
    sizes = GroupSizes(8, {5: 4, 3: 6})
    assert [sizes.at(step) for step in range(1, 8)] == [8, 8, 6, 6, 4, 4, 4]
    assert GroupSizes(8).at(1000) == 8 and sizes.largest == 8


def test_the_number_of_steps_is_that_of_a_run_counted_answer_by_answer():
    for changes in ({}, {2: 4}, {3: 4, 5: 16}, {1: 2}):
        sizes = GroupSizes(8, changes)
        for answers in (1, 23, 24, 25, 48, 49, 72, 100, 1000):
            sampled = steps = 0
            while sampled < answers:
                steps += 1
                sampled += 3 * sizes.at(steps)
            assert sizes.steps_for(answers, prompts=3) == steps, (changes, answers)


@pytest.mark.parametrize("changes", [{0: 4}, {3: 1}])
def test_a_group_of_one_and_a_step_before_the_first_are_refused(changes):
    with pytest.raises(ValueError, match="env.repeats_schedule has a group size of"):
        GroupSizes(8, changes)


def test_the_reference_is_renewed_every_so_many_steps_or_never_or_always():
    rule = RefreshRule("steps", steps=3)
    due = [rule.is_due(0.0) for _ in range(7)]
    assert due == [False, False, True, False, False, True, False]
    assert not any(RefreshRule("never", steps=1).is_due(1.0) for _ in range(5))
    rule = RefreshRule("average", steps=3)
    assert all(rule.is_due(0.0) for _ in range(5))


def test_a_plateau_is_a_window_no_better_than_the_one_before_and_both_begin_behind_a_refresh():
    rule = RefreshRule("plateau", steps=2)
    rewards = [0.0, 0.1, 0.2, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2]
    # step 6: 0.3 + 0.2 against 0.2 + 0.3 is no rise; then steps 7 and 8 against 9 and 10
    assert [step for step, reward in enumerate(rewards, 1) if rule.is_due(reward)] == [6, 10]


def test_a_resumed_rule_is_due_when_the_first_one_would_have_been():
    rule, resumed = RefreshRule("plateau", steps=2), RefreshRule("plateau", steps=2)
    for reward in (0.5, 0.5, 0.5):
        assert not rule.is_due(reward)
    resumed.restore(rule.state())
    assert rule.is_due(0.5) and resumed.is_due(0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"when": "often"}, r"ref_model\.refresh=often"), ({"steps": 0}, r"ref_model\.refresh_steps=0")],
)
def test_a_wrong_setting_of_the_refresh_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        RefreshRule(**settings)
