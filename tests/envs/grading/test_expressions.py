from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.envs.countdown import check

RIGHT = [
    ([44, 19, 35], 98, "44 + 19 + 35"), ([44, 19, 35], 98, "44+19+35"), ([44, 19, 35], 98, " ( 44 + 19 )\n+ 35 "),
    ([8, 3], 5, "8 - 3"), ([8, 3], 24, "3 * 8"), ([8, 4], 2, "8 / 4"), ([5], 5, "5"), ([5], 5, "((5))"),
    # precedence, and from left to right
    ([2, 3, 4], 14, "2 + 3 * 4"), ([2, 3, 4], 20, "(2 + 3) * 4"), ([9, 4, 3], 2, "9 - 4 - 3"),
    ([9, 4, 3], 8, "9 - (4 - 3)"), ([24, 4, 3], 2, "24 / 4 / 3"), ([24, 4, 3], 18, "24 / 4 * 3"),
    ([24, 4, 2], 12, "24 / (4 / 2)"), ([10, 2, 3], 16, "10 + 2 * 3"),
    # exact fractions: 8 / (3 - 8/3) = 8 / (1/3); 5 * (5 - 1/5) = 25 - 1; 6 / (1 - 3/4) = 6 * 4; 1/3 * 3 = 1
    ([3, 3, 8, 8], 24, "8 / (3 - 8/3)"), ([1, 5, 5, 5], 24, "5 * (5 - 1/5)"), ([1, 3, 4, 6], 24, "6 / (1 - 3/4)"),
    ([1, 3, 3], 1, "1/3*3"),
    # signs
    ([8, 3], 5, "-3 + 8"), ([8, 3], 11, "8 - -3"), ([8, 3], 11, "--8 + 3"), ([8, 3], -5, "-(8 - 3)"),
    # at most once: some may be left over, and what is given twice may be used twice
    ([2, 5, 7], 10, "2 * 5"), ([5, 5], 25, "5 * 5"), ([0, 5], 5, "0 + 5"),
]  # fmt: skip

WRONG = [
    # another value
    ([44, 19, 35], 98, "44 + 19 - 35"), ([2, 3, 4], 20, "2 + 3 * 4"), ([7, 2], 3, "7 / 2"), ([1, 3], 0, "1 / 3"),
    ([3, 10], 3, "10 / 3"), ([8, 3], 5, "3 - 8"),
    # other numbers
    ([3, 8], 24, "3 * 8 * 1"), ([5, 2], 25, "5 * 5"), ([44, 19], 98, "98"), ([4, 4], 44, "44"), ([1, 2], 3, "12 - 9"),
    ([7, 11], 1, "7/11 + 4/11"), ([5, 2], 10, "5 * 2 + 0"), ([5, 2], 3, "5 - 2.0"), ([5], 5, "05"), ([5], 5, "5.0"),
    # no expression
    ([5], 5, ""), ([5], 5, "   "), ([5], 5, "five"), ([5, 2], 7, "5 + 2 = 7"), ([5, 2], 7, "7 = 5 + 2"),
    ([5, 2], 7, "5 + "), ([5, 2], 7, "5 2 +"), ([5, 2], 7, "(5 + 2"), ([5, 2], 7, "5 + 2)"), ([5, 2], 7, "5 + (2"),
    ([5, 2], 7, "() 5 + 2"), ([5, 2], 10, "5(2)"), ([5, 2], 10, "(5)(2)"), ([5, 2], 10, "5 2"), ([5, 2], 52, "5 2"),
    ([5, 2], 7, "5 + 2;"), ([5, 2], 7, "$5 + 2$"), ([5, 2], 7, "5 + 2 # seven"), ([5, 2], 10, "5 * * 2"),
    ([5, 2], 10, "* 5 2"), ([5, 2], 10, "5 × 2"), ([5, 2], 10, "5 \\times 2"), ([5, 2], 7, "５ + ２"),
    ([5, 2], 7, "٥ + 2"),
    # operators that are none here
    ([5, 2], 25, "5 ** 2"), ([5, 2], 2, "5 // 2"), ([5, 2], 1, "5 % 2"), ([5, 2], 25, "5 ^ 2"), ([5, 2], 20, "5 << 2"),
    ([5, 2], 7, "5 | 2"), ([5, 2], 7, "5 or 2"), ([5], -6, "~5"), ([5, 2], 500, "5e2"), ([5, 2], 7, "0x5 + 2"),
    ([5, 2], 7, "5_ + 2"), ([5, 2], 7, "__import__('os').getpid() * 0 + 7"), ([99, 98, 97], 1, "99**98**97"),
    # division by zero
    ([5, 0], 5, "5 / 0"), ([5, 2, 2], 5, "5 / (2 - 2)"), ([5, 0, 0], 0, "0 * (5 / 0)"),
]  # fmt: skip


@pytest.mark.parametrize(("numbers", "target", "expression"), RIGHT)
def test_an_expression_of_the_numbers_that_equals_the_target_is_right(numbers, target, expression):
    assert check(numbers, target, expression)


@pytest.mark.parametrize(("numbers", "target", "expression"), WRONG)
def test_anything_else_is_wrong(numbers, target, expression):
    assert not check(numbers, target, expression)


def test_each_number_may_be_asked_for_exactly_once():
    assert check([2, 5, 7], 10, "2 * 5") and not check([2, 5, 7], 10, "2 * 5", use_all=True)
    assert check([2, 5, 7], 17, "2 * 5 + 7", use_all=True)
    assert not check([5, 5], 25, "5 * 5 * 5 / 5", use_all=True)
    assert check([5, 5], 25, "5 * 5", use_all=True)


@st.composite
def expressions(draw) -> tuple[str, Fraction | None, list[int]]:
    """Text, value (None: a division by zero) and numbers, put together from below: nothing here reads an expression."""
    parts = [(str(n), Fraction(n), [n]) for n in draw(st.lists(st.integers(0, 999), min_size=1, max_size=9))]
    while len(parts) > 1:
        (left, x, before), (right, y, after), *parts = parts
        sign, space = draw(st.sampled_from("+-*/")), draw(st.sampled_from(["", " ", "\n"]))
        if x is None or y is None or (sign == "/" and y == 0):
            value = None
        else:
            value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else None}[sign]
        negative = draw(st.booleans())
        text = f"{'-' if negative else ''}({left}{space}{sign}{space}{right})"
        parts.append((text, -value if negative and value is not None else value, before + after))
    return parts[0]


@pytest.mark.slow
@given(expressions())
def test_a_random_expression_has_the_value_that_fractions_give(expression):
    text, value, numbers = expression
    if value is None:
        assert not check(numbers, 0, text)
    elif value.denominator == 1:
        assert check(numbers, int(value), text, use_all=True)
        assert not check(numbers, int(value) + 1, text)
    else:
        assert not check(numbers, int(value), text) and not check(numbers, int(value) + 1, text)
    if value is not None and value.denominator == 1:
        assert not check(numbers[1:], int(value), text)
        assert check(numbers + [7], int(value), text) and not check(numbers + [7], int(value), text, use_all=True)


def test_depth_and_length_are_bounded_and_what_is_usual_is_far_inside():
    assert check([5], 5, "(" * 32 + "5" + ")" * 32)
    assert not check([5], 5, "(" * 33 + "5" + ")" * 33)
    assert check([5], 5, "5" + " " * 1000)  # spaces around it don't count
    assert check([5], 5, "-" * 254 + "5") and not check([5], 5, "-" * 256 + "5")
