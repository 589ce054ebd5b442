"""Sample: groups and responses that the page shows of a run too large to show whole, and the length of their texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from grpo_rl.storage.printable import printable

T = TypeVar("T")
MAX_POINTS = 2000
"""A longer series is shown in bins: no screen shows more, and a week's run must not make a 50 MB page."""


def evenly(items: Sequence[T], count: int) -> list[T]:
    """At most so many items, 2 or more, evenly spaced, the first and the last among them.

    >>> evenly([1, 2, 3, 4, 5, 6, 7], 3), evenly([1, 2], 3)
    ([1, 4, 7], [1, 2])
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def binned(items: Sequence[T]) -> list[Sequence[T]]:
    """Neighbours together, in at most ``MAX_POINTS`` bins, all but the last of the same size.

    >>> [len(bin) for bin in binned(range(5001))][-2:], binned([1, 2])
    ([3, 3], [[1], [2]])
    """
    size = math.ceil(len(items) / MAX_POINTS) or 1
    return [items[i : i + size] for i in range(0, len(items), size)]


def shortened(text: str, most: int) -> tuple[str, int]:
    """The text without control characters, cut to so many characters, and how many characters were cut off.

    >>> shortened("a\\x07bcde", 3)
    ('abc', 2)
    """
    text = printable(text)
    return text[:most], max(len(text) - most, 0)


def fitting(texts: Sequence[str], budget: int) -> int:
    """The characters to which longer texts can be cut so that all together take about ``budget`` bytes.

    >>> fitting(["ab", "abcdefghij", "abcdefghij"], 12), fitting(["ab", "abc"], 12)
    (5, 12)
    """
    wide = sum(len(text.encode("utf-8", "replace")) for text in texts) / max(sum(map(len, texts)), 1)
    left = whole = int(budget / max(wide, 1))
    for number, length in enumerate(sorted(map(len, texts))):
        share = max(left, 0) // (len(texts) - number)
        if length > share:
            return share
        left -= length
    return whole


def rounded(value: float | None) -> float | None:
    """The value to four decimals; None where it is missing or not finite."""
    return None if value is None or not math.isfinite(value) else round(value, 4)
