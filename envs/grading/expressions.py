"""Checks whether an expression of given numbers reaches a target, in exact fractions; it is never run as code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

MAX_CHARS, MAX_DEPTH = 256, 32
"""The limits of an expression: one of ten numbers of three digits takes about 80 characters, and brackets nine deep."""

_TOKEN = re.compile(r"\s*(?:(0|[1-9][0-9]*)|([-+*/()]))")


def check(numbers: Sequence[int], target: int, expression: str, use_all: bool = False) -> bool:
    """Tells whether ``expression`` equals ``target`` and uses each of ``numbers`` at most once, or exactly once.

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
    tokens = _tokens(expression)
    if tokens is None:
        return None
    parser = _Parser(tokens)
    try:
        value = parser.sum(0)
    except (SyntaxError, ZeroDivisionError):
        return None
    if parser.at < len(tokens):
        return None
    return value, Counter(token for token in tokens if isinstance(token, int))


def _tokens(expression: str) -> list[int | str] | None:
    text = expression.strip()
    if len(text) > MAX_CHARS:
        return None
    tokens: list[int | str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(int(match[1]) if match[1] else match[2])
        at = match.end()
    return tokens


class _Parser:
    """A parser by recursive descent: a sum is products between + and -, a product is factors between * and /.

    Raises:
        SyntaxError: the tokens are no expression.
        ZeroDivisionError: they divide by zero.
    """

    def __init__(self, tokens: Sequence[int | str]) -> None:
        self.tokens, self.at = tokens, 0

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while (sign := self._take("+-")) is not None:
            operand = self.product(depth)
            value = value + operand if sign == "+" else value - operand
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while (sign := self._take("*/")) is not None:
            operand = self.factor(depth)
            value = value * operand if sign == "*" else value / operand
        return value

    def factor(self, depth: int) -> Fraction:
        negative = False
        while (sign := self._take("+-")) is not None:
            negative ^= sign == "-"
        value = self.bracket(depth) if self._take("(") else self.number()
        return -value if negative else value

    def bracket(self, depth: int) -> Fraction:
        if depth == MAX_DEPTH:
            raise SyntaxError("nested too deep")
        value = self.sum(depth + 1)
        if not self._take(")"):
            raise SyntaxError("an open bracket")
        return value

    def number(self) -> Fraction:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if not isinstance(token, int):
            raise SyntaxError("no number where one is needed")
        self.at += 1
        return Fraction(token)

    def _take(self, signs: str) -> str | None:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if not isinstance(token, str) or token not in signs:
            return None
        self.at += 1
        return token
