"""Weights of tokens: worked out by hand, and independent of how a step is split into micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.losses.aggregate import token_weights

HOWS = ("sequence_mean", "token_mean")


@st.composite
def steps(draw):
    """Answer lengths (some empty), which tokens are trained, and where the step is cut into micro-batches."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    total = sum(lengths)
    trainable = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    cuts = draw(st.lists(st.integers(0, len(lengths)), max_size=4))
    edges = [0, *sorted(cuts), len(lengths)]
    return torch.tensor(lengths), torch.tensor(trainable, dtype=torch.bool), edges


def test_sequence_mean_matches_the_table_worked_out_by_hand():
    # Answers of 1, 3, 0 and 2 tokens; one token of the second and all of the fourth came from a tool. Four answers:
    # the first token weighs 1/4, the two trained tokens of the second 1/2 * 1/4, and the others nothing.
    trainable = torch.tensor([True, True, False, True, False, False])
    weights = token_weights(torch.tensor([1, 3, 0, 2]), trainable, "sequence_mean", num_sequences=4, num_tokens=3)
    assert weights.tolist() == [0.25, 0.125, 0.0, 0.125, 0.0, 0.0]


def test_token_mean_matches_the_table_worked_out_by_hand():
    # Two trained tokens here of eight in the step.
    trainable = torch.tensor([True, False, True])
    weights = token_weights(torch.tensor([1, 2]), trainable, "token_mean", num_sequences=5, num_tokens=8)
    assert weights.tolist() == [0.125, 0.0, 0.125]


@given(steps(), st.sampled_from(HOWS), st.integers(0, 2**32))
def test_splitting_into_micro_batches_does_not_change_the_loss(step, how, seed):
    lengths, trainable, edges = step
    per_token = torch.randn(len(trainable), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    counts = {"num_sequences": len(lengths), "num_tokens": int(trainable.sum())}

    # The definition, answer by answer, with no weights.
    answers = [x[m] for x, m in zip(per_token.split(lengths.tolist()), trainable.split(lengths.tolist()), strict=True)]
    if how == "sequence_mean":
        expected = sum(float(x.mean()) for x in answers if len(x)) / len(answers)
    else:
        expected = float(torch.cat(answers).mean()) if counts["num_tokens"] else 0.0

    starts = [0, *lengths.cumsum(0).tolist()]
    loss = 0.0
    for first, last in zip(edges, edges[1:], strict=False):
        tokens = slice(starts[first], starts[last])
        weights = token_weights(lengths[first:last], trainable[tokens], how, **counts, dtype=torch.float64)
        loss += float((weights * per_token[tokens]).sum())
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(steps(), st.sampled_from(HOWS))
def test_weights_add_up_to_one_over_a_step_in_which_every_answer_trains(step, how):
    lengths, _, _ = step
    lengths = lengths.clamp(min=1)
    trainable = torch.ones(int(lengths.sum()), dtype=torch.bool)
    weights = token_weights(lengths, trainable, how, len(lengths), len(trainable), dtype=torch.float64)
    assert float(weights.sum()) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("how", HOWS)
def test_a_step_without_a_trained_token_has_zero_weights(how):
    weights = token_weights(torch.tensor([0, 2]), torch.zeros(2, dtype=torch.bool), how, 2, 0)
    assert weights.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_sequences": 1}, "holds 2 answers, more than num_sequences=1"),
        ({"how": "token_mean", "num_tokens": 2}, "trains 3 tokens, more than num_tokens=2"),
        ({"how": "mean"}, "unknown aggregation 'mean'; choose one of sequence_mean, token_mean"),
        ({"lengths": torch.tensor([1, 1])}, "lengths add up to 2 tokens, but there are 3"),
    ],
)
def test_counts_that_cannot_be_of_the_whole_step_are_refused(change, message):
    settings = {
        "lengths": torch.tensor([1, 2]),
        "trainable": torch.ones(3, dtype=torch.bool),
        "how": "sequence_mean",
        "num_sequences": 2,
        "num_tokens": 3,
    }
    with pytest.raises(ValueError, match=message):
        token_weights(**settings | change)
