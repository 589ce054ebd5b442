import numpy as np
import pytest
from scipy import stats

from grpo_rl.report.headline import headline, note, training_change


def steps(*rewards: float) -> list[dict[str, float]]:
    return [{"step": i, "reward/mean": float(reward)} for i, reward in enumerate(rewards, start=1)]


@pytest.mark.parametrize(
    "interval, start",
    [
        ([0.1, 0.3], "Held-out reward rose from 0.000 to 0.200: a gain of +0.200"),
        ([-0.3, -0.1], "Held-out reward fell"),
        ([-0.1, 0.3], "Held-out reward went from 0.000 to 0.200: no clear change"),
    ],
)
def test_the_headline_claims_no_more_than_its_interval(interval, start):
    summary = {"eval_before": 0.0, "eval_after": 0.2, "eval_gain": 0.2, "eval_gain_ci95": interval}
    assert headline([], summary).startswith(start)


def test_without_an_evaluation_first_and_last_steps_are_compared_with_an_interval():
    # Ten steps: 5 of mean 2 and 5 of mean 7. Deviations -2 to 2 have variance 10 / 4, lagged products of 4 / 4 and
    # -1 / 4, and two lags: a mean's variance is (2.5 + 2 * (2 / 3 * 1 - 1 / 3 * 1 / 4)) / 5 = 11 / 15.
    half = stats.t.ppf(0.975, 8) * (2 * 11 / 15) ** 0.5
    assert headline(steps(*range(10)), {}) == (
        "Training reward rose from 2.000 to 7.000 (means of the first and the last 5 of 10 steps): a gain of +5.000, "
        f"95 % interval {5 - half:+.3f} to {5 + half:+.3f}."
    )


def test_noise_alone_is_called_a_change_as_seldom_as_the_interval_promises():
    rng = np.random.default_rng(0)
    called = [training_change(list(rng.normal(size=60))).verb is not None for _ in range(1000)]
    assert 0.02 < np.mean(called) < 0.08  # 5 %, and three standard errors of 1,000 draws


def test_a_run_that_goes_on_compares_its_evaluations_so_far():
    rows = [{"step": 0, "eval/reward": 0.4, "eval/standard_error": 0.03}, *steps(0.1, 0.2)]
    rows += [{"step": 10, "eval/reward": 1.0, "eval/standard_error": 0.04}]
    # 1.96 * sqrt(0.03**2 + 0.04**2) = 0.098
    assert headline(rows, {}) == (
        "So far, held-out reward rose from 0.400 to 1.000 (step 10): a gain of +0.600, 95 % interval +0.502 to +0.698."
    )


def test_the_note_has_the_one_evaluation_where_no_gain_can_be_stated():
    evaluated = {"step": 0, "eval/reward": 0.5, "eval/standard_error": 0.1}
    assert "there is no gain to state (evaluate.rows);" in note(steps(0.1, 0.2), {}, "ended")
    once = note([evaluated, *steps(0.1, 0.2)], {}, "ended")
    assert "no gain to state; held-out reward was 0.500 after step 0;" in once and "evaluate.rows" not in once
