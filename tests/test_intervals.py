"""Intervals: of paired gains and of means over rows. benchmarks/intervals.py measures their coverage."""

import math

import numpy as np
import pytest
from scipy import stats

from grpo_rl.intervals import mean_interval, paired_gain


def test_the_interval_is_students_t_of_the_differences_however_the_rows_spread():
    before, difference = np.random.default_rng(2).normal([[0.0], [0.3]], [[100.0], [1.0]], (2, 20))
    gain = paired_gain(before, before + difference)
    expected = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    assert gain.ci95 == [gain.low, gain.high] == pytest.approx([expected.low, expected.high], rel=1e-9)


@pytest.mark.filterwarnings("error")
def test_where_no_row_changes_the_interval_is_what_no_change_in_n_rows_leaves_possible():
    # Of 20 rows none changed: 1 - 0.025^(1/20) = 0.1684 of all could, each by the range of 3 that rewards have.
    rewards = [0.0, 3.0] + [0.5] * 18
    gain = paired_gain(rewards, rewards)
    assert gain.mean == 0 and gain.high == -gain.low == pytest.approx(3 * (1 - 0.025**0.05))
    assert stats.binom.pmf(0, 20, gain.high / 3) == pytest.approx(0.025)  # by the definition
    # A hundred times the rows leave about a hundredth of it: the rule of three, at 97.5 % 3.69 / n.
    many = paired_gain(rewards * 100, rewards * 100)
    assert many.high == pytest.approx(3 * 3.69 / 2000, rel=1e-2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rounding_makes_no_difference_between_rows_that_gain_the_same(dtype):
    before, after = (np.array(x, dtype=dtype).tolist() for x in ([1.0, 0.0] * 10, [1.1, 0.1] * 10))
    gain, exact = paired_gain(before, after), paired_gain([1.0, 0.0] * 10, [1.5, 0.5] * 10)
    assert gain.mean == pytest.approx(0.1, rel=1e-6)
    assert gain.high - gain.mean == pytest.approx((exact.high - 0.5) * 1.1 / 1.5)  # the ranges are 1.1 and 1.5
    assert gain.verdict == "no difference shown"


@pytest.mark.parametrize(
    "before, after, message",
    [
        ([1.0], [2.0], "at least 2"),
        ([1.0, 2.0], [1.0], "same rows"),
        ([0.0, 1.0, 2.0], [math.inf, 1.0, 2.0], "1 of 6"),
    ],
)
def test_what_gives_no_interval_is_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        paired_gain(before, after)


def test_a_share_of_rows_has_wilsons_interval():
    # By hand: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), p = 0.75, n = 20, z = 1.96
    z, n, p = 1.959963985, 20, 0.75
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    ends = [(p + z**2 / (2 * n) + sign * half) / (1 + z**2 / n) for sign in (-1, 1)]
    estimate = mean_interval([1.0] * 15 + [0.0] * 5, (0.0, 1.0))
    assert estimate.ci95 == pytest.approx(ends) and estimate.mean == 0.75


def test_a_mean_of_other_numbers_has_students_t_within_its_bounds():
    values = [0.0, 0.5, 0.5, 0.25, math.nan]
    expected = stats.ttest_1samp(values[:4], 0).confidence_interval(0.95)
    assert mean_interval(values).ci95 == pytest.approx([expected.low, expected.high])
    assert mean_interval(values, (0.0, 1.0)).ci95 == pytest.approx([0.0, expected.high])
    assert expected.low < 0
    # Rewards have no bound that is known: ten zeros leave more open than ten wrong answers.
    assert mean_interval([0.0] * 10).high == pytest.approx(1 - 0.025**0.1)
    assert mean_interval([0.0] * 10, (0.0, 1.0)).high == pytest.approx(3.8415 / 13.8415, rel=1e-4)
    with pytest.raises(ValueError, match="1 row"):
        mean_interval([1.0, math.nan])
