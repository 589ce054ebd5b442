from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.envs.base import LLMEnv, Reward, Task, Unjudgeable
from grpo_rl.training.evaluate import evaluate, paired_gain, pass_at_k

GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=2)


class Doubling(Task):
    reward_parts = ("correct", "format")
    rows = ({"question": "unused", "answer": ""},)

    def prompt(self, row):
        return [{"role": "user", "content": row["question"]}]

    def score(self, row, response):
        if row["answer"] == "?":
            raise Unjudgeable("no answer is known")
        return Reward({"correct": 2.0 * (response == row["answer"]), "format": 0.5})


class Tokenizer:
    """One token a number, no chat template."""

    chat_template = None

    def __len__(self):
        return 100

    def __call__(self, texts):
        return {"input_ids": [[int(text)] for text in texts]}

    def batch_decode(self, batch, **_):
        return [" ".join(str(int(i)) for i in ids) for ids in batch]


class Doubler:
    """An engine that responds to a prompt [x] with [2x], and cuts responses above 9."""

    def generate(self, prompts, n, sampling):
        assert n == 1 and sampling == GREEDY
        return [Samples.from_lists([[2 * p[0]]], [[0.0]], [2 * p[0] > 9], version=0) for p in prompts]


def run(questions):
    env = LLMEnv(Doubling(), Tokenizer(), 1, 2)
    return evaluate(env, Doubler(), [{"question": str(q), "answer": a} for q, a in questions], GREEDY)


def test_every_row_is_sampled_once_and_judged_in_its_place():
    result = run([(1, "2"), (2, "5"), (5, "10")])
    assert result.completions == ["2", "4", "10"]
    assert result.rewards == [2.5, 0.5, 2.5]
    assert result.parts == {"correct": pytest.approx(4 / 3), "format": 0.5}
    assert result.truncated == [False, False, True]


def test_metrics_are_means_over_rows():
    metrics = run([(1, "2"), (2, "5")]).metrics()
    assert metrics == {
        "eval/reward": 1.5,
        "eval/standard_error": pytest.approx(1.0),  # sqrt(2) / sqrt(2): two rewards, 2 apart
        "eval/correct": 1.0,
        "eval/format": 0.5,
        "eval/mean_length": 1.0,
        "eval/truncated_fraction": 0.0,
        "eval/failed": 0.0,
    }


def test_a_row_that_cannot_be_judged_is_left_out_of_means_and_gains():
    result = run([(1, "2"), (2, "?"), (3, "6")])
    assert math.isnan(result.rewards[1]) and result.reward == 2.5
    assert result.metrics()["eval/failed"] == 1
    assert paired_gain([0.0, 0.0, 0.5], result.rewards).mean == 2.25
    with pytest.raises(ValueError, match="none of the 1 held-out responses could be judged.*no answer is known"):
        run([(2, "?")])


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="evaluate.rows=0"):
        run([])


def test_the_interval_of_a_paired_gain_ignores_the_spread_between_rows():
    rng = np.random.default_rng(1)
    before = rng.normal(0, 100, 60)  # rows differ wildly
    after = before + 1 + rng.normal(0, 0.1, 60)  # and gain about 1 each
    gain = paired_gain(before, after)
    # Standard error 0.1 / sqrt(60) = 0.013, so the interval is about 1 +- 0.026; unpaired it would be +- 36.
    assert 0.94 < gain.low < gain.mean < gain.high < 1.06
    assert gain.ci95 == [gain.low, gain.high]


def test_the_interval_agrees_with_students_t_where_that_holds():
    difference = np.random.default_rng(2).normal(0.3, 1.0, 200)
    gain = paired_gain(np.zeros(200), difference, seed=3)
    low, high = stats.t.interval(0.95, 199, loc=difference.mean(), scale=stats.sem(difference))
    assert gain.low == pytest.approx(low, abs=0.02) and gain.high == pytest.approx(high, abs=0.02)


def test_the_same_seed_gives_the_same_interval():
    before, after = [0, 0, 1, 0, 1, 0], [1, 0, 1, 1, 1, 0]
    assert paired_gain(before, after, seed=5) == paired_gain(before, after, seed=5)


@pytest.mark.filterwarnings("error")
def test_equal_differences_give_a_point():
    gain = paired_gain([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])
    assert (gain.mean, gain.low, gain.high) == (0.0, 0.0, 0.0)


@pytest.mark.filterwarnings("error")
def test_one_gaining_row_in_many_has_a_finite_interval_without_warnings():
    after = np.zeros(50)
    after[0] = 1.0
    gain = paired_gain(np.zeros(50), after)
    assert gain.mean == pytest.approx(0.02) and 0 <= gain.low <= gain.mean < gain.high


def test_an_undefined_bca_interval_falls_back_to_percentiles(monkeypatch):
    real = stats.bootstrap

    def bootstrap(*data, method, **settings):
        undefined = SimpleNamespace(confidence_interval=(np.nan, np.nan))
        return undefined if method == "BCa" else real(*data, method=method, **settings)

    monkeypatch.setattr(stats, "bootstrap", bootstrap)
    gain = paired_gain([0, 0, 0, 0], [1, 1, 1, 0])
    assert gain.low <= 0.75 <= gain.high <= 1


@pytest.mark.parametrize(
    "before, after, message",
    [
        ([1.0], [2.0], "at least 2"),
        ([1.0, 2.0], [1.0], "same rows"),
        ([0.0, 1.0], [math.nan, 1.0], "at least 2"),
        ([0.0, 1.0, 2.0], [math.inf, 1.0, 2.0], "1 of 6"),
    ],
)
def test_what_gives_no_interval_is_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        paired_gain(before, after)


@pytest.mark.parametrize("n, c, k", [(5, 2, 3), (6, 1, 2), (4, 0, 2), (4, 4, 1), (5, 3, 3)])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_answer(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_more_draws_than_answers():
    with pytest.raises(ValueError, match="pass@9 of 8 responses"):
        pass_at_k(8, 1, 9)
