"""Scores of several responses to one row: pass@k, and the majority's answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of ``k`` responses is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1. The obvious 1 - (1 - c/n)^k is too low.

    Raises:
        ValueError: unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.

    Of 5 responses 2 are right; of the 10 ways to pick 3 of them, 1 has no right one:

    >>> pass_at_k(5, 2, 3)
    0.9
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} responses with {num_correct} correct: "
            "needs 0 <= correct <= responses and 1 <= k <= responses"
        )
    return float(1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k)))


def ks(samples: int) -> list[int]:
    """The k of pass@k that are reported for so many responses to a row: powers of two, and all.

    >>> ks(8), ks(6), ks(1)
    ([1, 2, 4, 8], [1, 2, 4, 6], [1])
    """
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> tuple[float, bool]:
    """The chance that the answer that most responses state is right, and whether several answers tie.

    Among answers that tie one is drawn: the chance is the share of right ones. Responses that state no answer have no
    vote; if none does, the majority is wrong. Responses that are right in one form and wrong in another, with one
    answer, count by their share.

    Args:
        answers: the final answer of each response, equal ones written alike.
        correct: whether each response is right.

    >>> majority(["7", "7", "8", None], [True, True, False, False]), majority(["7", "8"], [True, False])
    ((1.0, False), (0.5, True))
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0, False
    most = max(votes.values())
    leading = [answer for answer, count in votes.items() if count == most]
    right = [sum(c for a, c in zip(answers, correct, strict=True) if a == answer) / most for answer in leading]
    return sum(right) / len(leading), len(leading) > 1
