"""Checks whether an expression of given numbers reaches a target, in exact fractions; it is never run as code."""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from grpo_rl.envs.tools.arithmetic import Unreadable, value_of

MAX_CHARS, MAX_DEPTH = 256, 32
"""The limits of an expression: one of ten numbers of three digits takes about 80 characters, and brackets nine deep."""

_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*/()]")


def check(numbers: Sequence[int], target: int, expression: str, use_all: bool = False) -> bool:
    """True if ``expression`` equals ``target`` and uses each of ``numbers`` at most once, or exactly once.

    An expression is made of whole numbers, ``+ - * /``, signs and round brackets, and computed in exact fractions:
    nothing else is read, and nothing evaluated as code. One that is longer than :data:`MAX_CHARS` characters, nested
    deeper than :data:`MAX_DEPTH`, or divides by zero, is wrong.

    >>> check([3, 3, 8, 8], 24, "8 / (3 - 8/3)"), check([3, 8], 24, "3 * 8 * 1"), check([3, 8], 24, "3 * 8 = 24")
    (True, False, False)
    >>> check([2, 5, 7], 10, "2 * 5"), check([2, 5, 7], 10, "2 * 5", use_all=True)
    (True, False)
    """
    found = evaluated(expression)
    if found is None:
        return False
    value, used = found
    allowed = used == Counter(numbers) if use_all else used <= Counter(numbers)
    return allowed and value == target


def evaluated(expression: str) -> tuple[Fraction, Counter[int]] | None:
    """The value of an expression, and the numbers in it; None if it is no expression, or divides by zero."""
    text = expression.strip()
    tokens = _TOKEN.findall(text) if len(text) <= MAX_CHARS else []
    if "".join(tokens) != "".join(text.split()):
        return None
    depths = accumulate({"(": 1, ")": -1}.get(token, 0) for token in tokens)
    if max(depths, default=0) > MAX_DEPTH:
        return None
    try:
        # Apart, as `**` and `//` are no operators here.
        value = value_of(" ".join(tokens))
    except (Unreadable, ZeroDivisionError, OverflowError):
        return None
    return value, Counter(int(token) for token in tokens if token.isdigit())
