"""pass@k against the enumeration of subsets in exact fractions, and the majority against that of every draw."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from grpo_rl.training.evaluate import majority, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_response(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets)))


def test_pass_at_k_of_many_responses_has_no_rounding():
    # 200 responses, 1 right: it is among 10 of them with 10 / 200. Binomials of 200 exceed 2^53.
    assert pass_at_k(200, 1, 10) == 0.05


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "7", "8"], [True, True, False], (1.0, False)),
        (["8", "8", "7"], [False, False, True], (0.0, False)),
        (["7", "8", "9"], [True, False, False], (pytest.approx(1 / 3), True)),
        ([None, None, "7"], [False, False, True], (1.0, False)),  # no answer is no vote
        ([None, None], [False, False], (0.0, False)),
        (["7", "7", "8", "8"], [True, False, False, False], (0.25, True)),  # one 7 in a wrong form
    ],
)
def test_the_majority_is_of_stated_answers_and_a_tie_is_drawn(answers, correct, expected):
    assert majority(answers, correct) == expected
