"""RewardWatch: each kind of trouble is told once, and what looks like it is left alone."""

from __future__ import annotations

import pytest

from grpo_rl.monitor.watch import RewardWatch


def rows(steps=30, evaluations=(), **metrics):
    """A line a step, each metric a function of the step, and the evaluations (step, reward, standard error) between."""
    lines = []
    for step in range(1, steps + 1):
        own = {name.replace("__", "/"): value(step) for name, value in metrics.items()}
        lines.append({"step": step, "reward/mean": step / 10, **own})
        lines += [
            {"step": step, "eval/reward": reward, "eval/standard_error": error}
            for at, reward, error in evaluations
            if at == step
        ]
    return lines


def kinds(lines):
    return list(RewardWatch.over(lines).warnings)


@pytest.mark.parametrize(
    ("evaluations", "found"),
    [
        ([(10, 1.0, 0.05), (20, 0.7, 0.05)], ["held_out"]),  # 0.3 is 4.2 standard errors of 0.071
        ([(10, 1.0, 0.05), (20, 0.9, 0.05)], []),  # 1.4 standard errors
        ([(10, 0.7, 0.05), (20, 1.0, 0.05)], []),
        ([(10, 0.5, 0.0), (20, 1.0, 0.0), (30, 0.9, 0.0)], ["held_out"]),  # below its best, though above its start
    ],
)
def test_a_held_out_reward_that_falls_while_training_rises(evaluations, found):
    assert kinds(rows(evaluations=evaluations)) == found


def test_both_rewards_falling_is_another_trouble():
    falling = [row | ({"reward/mean": -row["step"]} if "reward/mean" in row else {}) for row in
               rows(evaluations=[(10, 1.0, 0.0), (20, 0.5, 0.0)])]  # fmt: skip
    assert kinds(falling) == []


@pytest.mark.parametrize(
    ("length", "correlation", "found"),
    [
        (lambda step: 100 + 10 * step, 0.8, ["length"]),
        (lambda step: 100 + 10 * step, 0.2, []),  # longer, and not paid for it
        (lambda step: 100, 0.8, []),
    ],
)
def test_responses_that_grow_because_length_pays(length, correlation, found):
    lines = rows(response__mean_length=length, response__length_correlation=lambda step: correlation)
    assert kinds(lines) == found


def test_each_warning_is_told_once_and_names_its_step():
    watch = RewardWatch()
    told = [text for row in rows(40, response__repetition=lambda step: 0.02 * step) for text in watch.update(row)]
    assert len(told) == 1 and told[0].startswith("Step 20: responses repeat themselves: 31 % of")
