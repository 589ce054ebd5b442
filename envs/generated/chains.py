"""Chains of operations on numbers too large for the head, each with its solution."""

import random
from collections.abc import Callable

Numbers = tuple[int, ...]

_WORDS = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}", "/": "divide by {}"}
COMPUTE: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__,
}  # fmt: skip


def solution(numbers: Numbers, operators: str) -> str:
    r"""The steps, one equation a line, and the gold number.

    >>> solution((3, 6, 4), "*+")
    '3 * 6 = 18\n18 + 4 = 22\n#### 22'
    """
    value, lines = numbers[0], []
    for operator, number in zip(operators, numbers[1:], strict=True):
        result = COMPUTE[operator](value, number)
        lines.append(f"{value} {operator} {number} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def problems(count: int, seed: int = 0) -> list[dict]:
    """``count`` chains of two to four steps on numbers too large for the head, no question twice; all values whole.

    >>> print(problems(1)[0]["answer"])
    964 - 141 = 823
    823 - 623 = 200
    200 - 100 = 100
    #### 100
    """
    rng = random.Random(seed)
    found: dict[str, dict] = {}
    while len(found) < count:
        numbers, operators = _chain(rng)
        *steps, last = [_WORDS[sign].format(number) for sign, number in zip(operators, numbers[1:], strict=True)]
        question = f"Start with {numbers[0]}, {', '.join(steps)}, then {last}. What is the result?"
        found.setdefault(question, {"question": question, "answer": solution(tuple(numbers), operators)})
    return list(found.values())


def _chain(rng: random.Random) -> tuple[list[int], str]:
    value = rng.randint(100, 999)
    numbers, operators = [value], ""
    for _ in range(rng.randint(2, 4)):
        divisors = [number for number in range(2, 100) if value % number == 0]
        signs = "+" + "-" * (value >= 200) + "*" * (value < 10**6) + "/" * bool(divisors and value >= 1000)
        sign = rng.choice(signs)
        bounds = {"+": (100, 9999), "-": (100, value - 100), "*": (12, 99)}
        number = rng.choice(divisors) if sign == "/" else rng.randint(*bounds[sign])
        value = COMPUTE[sign](value, number)
        numbers.append(number)
        operators += sign
    return numbers, operators
