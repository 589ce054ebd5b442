"""Evaluations and their metrics; pass@k against the subsets in exact fractions, and the majority against every draw."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.envs.base import LLMEnv, Reward, Task, Unjudgeable
from grpo_rl.intervals import paired_gain
from grpo_rl.testing import ScriptedEngine
from grpo_rl.training.evaluate import evaluate, majority, pass_at_k, row_scores, score_names

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

    max_model_len = 1000

    def generate(self, prompts, n, sampling):
        assert n == 1 and sampling == GREEDY
        return [Samples.from_lists([[2 * p[0]]], [[0.0]], [2 * p[0] > 9], version=0) for p in prompts]


def run(questions):
    env = LLMEnv(Doubling(), Tokenizer(), 1, 2)
    return evaluate(env, Doubler(), [{"question": str(q), "answer": a} for q, a in questions], GREEDY)


def test_every_row_is_sampled_once_judged_in_its_place_and_counts_in_the_means():
    result = run([(1, "2"), (2, "5"), (5, "10")])
    assert result.completions == ["2", "4", "10"]
    assert result.rewards == [2.5, 0.5, 2.5]
    assert result.truncated == [False, False, True]
    assert result.metrics() == {
        "eval/reward": pytest.approx(11 / 6),
        "eval/standard_error": pytest.approx(2 / 3),  # sqrt(4 / 3) / sqrt(3): deviations of 2/3, -4/3 and 2/3
        "eval/correct": pytest.approx(4 / 3),
        "eval/format": 0.5,
        "eval/mean_length": 1.0,
        "eval/truncated_fraction": pytest.approx(1 / 3),
        "eval/failed": 0.0,
    }


def test_a_row_that_cannot_be_judged_is_left_out_of_means_and_gains():
    result = run([(1, "2"), (2, "?"), (3, "6")])
    assert math.isnan(result.rewards[1]) and result.reward == 2.5
    assert result.metrics()["eval/failed"] == 1
    assert paired_gain([0.0, 0.0, 0.5], result.rewards).mean == 2.25
    with pytest.raises(ValueError, match="none of the 1 held-out responses could be judged.*no answer is known"):
        run([(2, "?")])


class Counting(Doubling):
    """Right responses state the row's answer; the token is the answer."""

    correct_part = "correct"

    def final_answers(self, responses):
        return [None if response == "0" else response for response in responses]


class Scripted(ScriptedEngine):
    """An engine that responds to prompt [x] with the responses listed under x, and draws a number where it samples."""

    def __init__(self, responses):
        super().__init__(lambda prompt, g: [responses[prompt[0]][g]])
        self.drawn = []

    def generate(self, prompts, n, sampling):
        if sampling.temperature:
            self.drawn.append(float(torch.rand(())))
        return super().generate(prompts, n, sampling)


def sampled(responses, samples, seed=0):
    engine = Scripted(responses)
    rows = [{"question": str(q), "answer": "7"} for q in responses]
    return evaluate(LLMEnv(Counting(), Tokenizer(), 1, 2), engine, rows, Sampling(), samples, seed), engine


def test_several_responses_to_a_row_give_pass_at_k_and_the_majority_of_each_row():
    result, _ = sampled({1: [7, 7, 8, 0], 2: [7, 8, 8, 8], 3: [0, 0, 0, 0]}, 4)
    assert result.completions[:5] == ["7", "7", "8", "0", "7"]
    assert result.row_rewards() == [1.5, 1.0, 0.5]
    scores = result.row_scores()
    assert scores["pass@1"] == [0.5, 0.25, 0.0]
    # Row 1: of the 6 pairs of [right, right, wrong, wrong] 5 have a right one. Row 2: the right one is in 3 of 6.
    assert scores["pass@2"] == [pytest.approx(5 / 6), 0.5, 0.0]
    assert scores["pass@4"] == [1.0, 1.0, 0.0]
    assert scores["maj@4"] == [1.0, 0.0, 0.0] and scores["tied"] == [0.0, 0.0, 0.0]
    result.correct[0] = None
    assert all(math.isnan(result.row_scores()[name][0]) for name in ("pass@4", "maj@4", "tied"))


def test_sampling_draws_alike_in_every_evaluation_and_leaves_the_generator_of_training_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = sampled({1: [7, 8]}, 2, seed=5)[1].drawn
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(10)
    assert sampled({1: [7, 8]}, 2, seed=5)[1].drawn == first
    assert sampled({1: [7, 8]}, 2, seed=6)[1].drawn != first


@pytest.mark.parametrize("samples", [0, 1, 4])
def test_the_scores_of_an_evaluation_are_those_that_are_named_before_it(samples):
    greedy = sampled({1: [7], 2: [8]}, 1)[0]
    drawn = sampled({1: [7, 7, 8, 0], 2: [8, 8, 0, 0]}, samples)[0] if samples else None
    scores = row_scores(greedy, drawn)
    assert set(score_names(Counting(), samples)) == set(scores)
    assert scores["accuracy"] == [1.0, 0.0] and (samples != 1 or scores["sampled_accuracy"] == [1.0, 0.0])
    assert score_names(Doubling(), 1) == ["reward", "sampled_reward"]  # which does not tell what is right


def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_response_without_rounding():
    for n in (1, 2, 5, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets)))
    # 200 responses, 1 right: it is among 10 of them with 10 / 200. Binomials of 200 exceed 2^53.
    assert pass_at_k(200, 1, 10) == 0.05


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "8", "9"], [True, False, False], (pytest.approx(1 / 3), True)),
        ([None, None, "7"], [False, False, True], (1.0, False)),  # no answer is no vote
        ([None, None], [False, False], (0.0, False)),
        (["7", "7", "8", "8"], [True, False, False, False], (0.25, True)),  # one 7 in a wrong form
    ],
)
def test_the_majority_is_of_stated_answers_and_a_tie_is_drawn(answers, correct, expected):
    assert majority(answers, correct) == expected
