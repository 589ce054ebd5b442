"""Weights of tokens, worked out by hand, and their sum over a step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.losses.aggregate import StepTotals, token_weights
from grpo_rl.losses.factors import AGGREGATE

HOWS = ("sequence_mean", "token_mean", AGGREGATE.bound("constant", normalizer=7.0), "prompt_mean")


@pytest.mark.parametrize(
    ("how", "lengths", "trainable", "totals", "sizes", "expected"),
    [
        # Responses of 1, 3, 0 and 2 tokens; one token of the second and all of the fourth came from a tool. Four of
        # them: the first token weighs 1/4, the two trained tokens of the second 1/2 * 1/4, and the others nothing.
        ("sequence_mean", [1, 3, 0, 2], [1, 1, 0, 1, 0, 0], StepTotals(4, 3, 2), [2, 2], [0.25, 0.125, 0, 0.125, 0, 0]),
        # Two trained tokens here of eight in the step.
        ("token_mean", [1, 2], [1, 0, 1], StepTotals(5, 8, 2), [2], [0.125, 0, 0.125]),
        # Four responses in the step, 10 tokens allowed to each: every trained token weighs 1/40.
        (AGGREGATE.bound("constant", normalizer=10), [1, 2], [1, 0, 1], StepTotals(4, 8, 2), [2], [0.025, 0, 0.025]),
        # Three prompts in the step, two of them here. The first has responses of 1 and 3 tokens, one a tool's: three
        # tokens share a weight of 1/3. The second has a response of two tokens, which share as much.
        ("prompt_mean", [1, 3, 2], [1, 1, 0, 1, 1, 1], StepTotals(4, 9, 3), [2, 1],
         [1 / 9, 1 / 9, 0, 1 / 9, 1 / 6, 1 / 6]),
    ],
)  # fmt: skip
def test_weights_match_the_table_worked_out_by_hand(how, lengths, trainable, totals, sizes, expected):
    step = torch.tensor(lengths), torch.tensor(trainable).bool(), how, totals, torch.tensor(sizes)
    weights = token_weights(*step)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from([how for how in HOWS if isinstance(how, str)]),
)
def test_weights_add_up_to_one_over_a_step_in_which_every_response_trains(prompts, how):
    lengths = torch.tensor([n for p in prompts for n in p])
    trainable = torch.ones(int(lengths.sum()), dtype=torch.bool)
    totals, sizes = StepTotals(len(lengths), len(trainable), len(prompts)), torch.tensor([len(p) for p in prompts])
    weights = token_weights(lengths, trainable, how, totals, sizes, dtype=torch.float64)
    assert float(weights.sum()) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("how", HOWS)
def test_a_step_without_a_trained_token_has_zero_weights(how):
    trainable = torch.zeros(2, dtype=torch.bool)
    weights = token_weights(torch.tensor([0, 2]), trainable, how, StepTotals(2, 0, 1), torch.tensor([2]))
    assert weights.tolist() == [0.0, 0.0]
