from __future__ import annotations

import itertools
import math

import pytest

from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.envs.base import LLMEnv, Reward, Task, Unjudgeable
from grpo_rl.intervals import paired_gain
from grpo_rl.training.evaluate import evaluate, pass_at_k

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


@pytest.mark.parametrize("n, c, k", [(5, 2, 3), (6, 1, 2), (4, 0, 2), (4, 4, 1), (5, 3, 3)])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_answer(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_more_draws_than_answers():
    with pytest.raises(ValueError, match="pass@9 of 8 responses"):
        pass_at_k(8, 1, 9)
