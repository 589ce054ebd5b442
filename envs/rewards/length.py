"""Rewards for a response's length, in characters or tokens: what matters is that all lengths have the same unit."""

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field


def group_length(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """A value for each response to one prompt, from 0.5 for the shortest to -0.5 for the longest.

    A wrong response gets at most 0.

    Source: Kimi k1.5, https://arxiv.org/abs/2501.12599, section 2.3.3, "Length Penalty"; Open-R1's ``length``.

    Args:
        lengths: of the responses to one prompt. Where all are equal, each gets 0.
        correct: whether each response is right.

    >>> group_length([100, 200, 300], [True, True, False])
    [0.5, 0.0, -0.5]
    """
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [share if right else min(0.0, share) for share, right in zip(shares, correct, strict=True)]


def cosine(
    length: int,
    correct: bool,
    *,
    max_len: Annotated[int, Field(ge=1)] = 1000,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    value_exceeded: float | None = None,
) -> float:
    """The best value for a short right response and the worst for a short wrong one, nearing each other with length.

    Between length 0 and ``max_len`` half a wave of a cosine leads from one value to the other: right responses had
    better be short, and wrong ones had better go on thinking.

    Source: "Demystifying Long Chain-of-Thought Reasoning in LLMs", https://arxiv.org/abs/2502.03373, the cosine reward;
    names and values are those of Open-R1's ``cosine``. There the wave turns back past ``max_len``, so that the longest
    responses earn as the shortest; here it stays where it ends.

    Args:
        max_len: where the wave ends.
        min_value_wrong: reward of a wrong response of length 0.
        max_value_wrong: reward of a wrong response of ``max_len``.
        min_value_correct: reward of a right response of ``max_len``.
        max_value_correct: reward of a right response of length 0.
        value_exceeded: reward of a response of ``max_len`` or more, the paper's r_e; None goes on with the wave's end.

    >>> cosine(0, True), cosine(500, True), cosine(1000, True), cosine(0, False)
    (1.0, 0.75, 0.5, -1.0)
    """
    start, end = (max_value_correct, min_value_correct) if correct else (min_value_wrong, max_value_wrong)
    if length >= max_len:
        return end if value_exceeded is None else value_exceeded
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * length / max_len))


def soft_overlong_punishment(length: int, *, max_len: int, cache: int) -> float:
    """0 up to ``max_len - cache``, then evenly down to -1 at ``max_len``, and -1 beyond.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 13, with lengths in tokens and a cache of 4096 below 20480.

    Args:
        max_len: the longest response that is not punished in full.
        cache: how far below it the punishment begins.

    Raises:
        ValueError: the cache is not between 1 and ``max_len``.

    >>> [soft_overlong_punishment(length, max_len=100, cache=20) for length in (80, 85, 100, 101)]
    [0.0, -0.25, -1.0, -1.0]
    """
    if not 1 <= cache <= max_len:
        raise ValueError(f"cache={cache}, max_len={max_len}; the cache must be at least 1 and at most max_len")
    return -min(1.0, max(0, length - (max_len - cache)) / cache) or 0.0
