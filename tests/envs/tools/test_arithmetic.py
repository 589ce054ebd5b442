import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.envs.tools.arithmetic import calculate, has_operation

TOO_LARGE = "Error: the numbers get too large"
BY_ZERO = "Error: division by zero"


def unreadable(reason: str) -> str:
    return f"Error: {reason}; use numbers, + - * / ** and brackets, such as 3*(4+5)"


NO_EXPRESSION = unreadable("that is no arithmetic expression")

VALUES = [
    # each operation, and what comes first
    ("3*(4+5)", "27"), ("48/2", "24"), ("7-10", "-3"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("2**10", "1024"),
    ("7//2", "3"), ("-7//2", "-4"), ("-3", "-3"), ("+3", "3"), ("--3", "3"), ("2**3**2", "512"), ("-2**2", "-4"),
    ("0", "0"), ("0*5", "0"), ("-0", "0"), ("5-5", "0"), ("2**-1", "0.5"), ("9**0.5", "3"), ("0**0", "1"),
    ("1e3", "1000"), ("1.5E+2", "150"), ("2e-1", "0.2"), (".5+.5", "1"), ("5.", "5"),
    # exact, where floats are not
    ("0.1+0.2", "0.3"), ("1.1*1.1", "1.21"), ("0.7*100", "70"), ("1/3*3", "1"), ("12345678.9*10", "123456789"),
    ("10**20+1-10**20", "1"),
    # ten decimals
    ("1/3", "0.3333333333"), ("2/3", "0.6666666667"), ("-1/3", "-0.3333333333"), ("1/8", "0.125"),
    ("100/7", "14.2857142857"),
    ("2**0.5", "1.4142135624"), ("1-1/10**11", "1"), ("10**25/3", "3333333333333333333333333.3333333333"),
    ("1/10**9", "1e-09"), ("-1/3/10**6", "-3.333333333e-07"), ("1/10**6", "0.000001"),
    # spellings
    ("3 × 4", "12"), ("8 ÷ 2", "4"), ("5 − 7", "-2"), ("2^3", "8"), ("3 x 4", "12"), ("3x4", "12"), ("(3)X(4)", "12"),
    ("1,234 + 1", "1235"), ("1,234,567*1", "1234567"), ("$48/2", "24"), ("$1,000.50 * 2", "2001"), ("48/2 =", "24"),
    ("48/2=25", "24"), ("7*4 = 28. So", "28"),
    ("[2+3]*4", "20"), ("  3\n+ 4 ", "7"), ("007+1", "8"), ("10.05+0", "10.05"), ("100+1", "101"),
    # thirty digits
    ("10**29*9", "9" + "0" * 29), ("-10**29*9", "-9" + "0" * 29), ("10**30", TOO_LARGE), ("-10**30", TOO_LARGE),
    ("9" * 30, "9" * 30), ("9" * 31, TOO_LARGE), ("10**30-1", "9" * 30),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "expected"), VALUES)
def test_expressions_have_their_value(expression, expected):
    assert calculate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1/0", BY_ZERO), ("1//0", BY_ZERO), ("0**-1", BY_ZERO), ("0**-0.5", BY_ZERO), ("1/(2-2)", BY_ZERO),
        ("9**3999999", TOO_LARGE), ("9**9**9", TOO_LARGE), ("10**10**10**10", TOO_LARGE), ("1e999", TOO_LARGE),
        ("2**(10**29)", TOO_LARGE), ("10**-1000", TOO_LARGE), ("1e308*1e308", TOO_LARGE),
        ("(10**30)**0.5*0+10**30", TOO_LARGE),
        ("9" * 200, TOO_LARGE), ("1e300**1.5", TOO_LARGE), ("*".join(["99999999"] * 22), TOO_LARGE),
        ("", unreadable("the expression is empty")), (" = ", unreadable("the expression is empty")),
        ("1" + "+1" * 100, unreadable("the expression has 201 characters, at most 200")),
        ("20% * 50", unreadable("there is no %, write 20/100 for 20%")),
        ("sqrt(16)", unreadable("can't read 's'")), ("x=7", unreadable("can't read 'x'")),
        ("=7", unreadable("the expression is empty")),
        ("'a'*9", unreadable("can't read \"'\"")), ("__import__('os')", unreadable("can't read '_'")),
        ("x", unreadable("can't read 'x'")), ("3;4", unreadable("can't read ';'")),
        ("4²", unreadable("can't read '²'")), ("５+1", unreadable("can't read '５'")),
        ("1, 2", unreadable("can't read ','")), ("1\x00", unreadable("can't read '\\x00'")),
        ("(-8)**(1/3)", unreadable("a negative number has no such power")),
        *((text, NO_EXPRESSION) for text in ("3+", "(3", "3 4", "3(4)", "()", "*(1)", "(" * 100 + ")" * 100)),
        *((text, NO_EXPRESSION) for text in ("e", "E.e", "e(1)", "...", "1..e", "1e", "1.2.3")),
    ],
)  # fmt: skip
def test_faults_are_described_in_words(expression, expected):
    assert calculate(expression) == expected


def hostile_expressions() -> list[str]:
    """Some that are large, deep, long, or want to be more than arithmetic."""
    powers = ["**".join(["9"] * n) for n in range(2, 67)]
    towers = [f"({'(' * n}9{'**9)' * n})" for n in range(1, 33)]
    roots = ["2" + "**0.5" * n for n in range(1, 40)]
    products = ["*".join(["9" * digits] * (200 // (digits + 1))) for digits in range(1, 100)]
    deep = ["(" * n + "1" + ")" * n for n in range(60, 100)] + ["-" * n + "1" for n in range(170, 200)]
    code = [
        "__import__('os').system('true')", "().__class__.__bases__[0].__subclasses__()",
        "open('/etc/passwd').read()", "[x for x in range(10**9)]", "(lambda: 1)()", "'a' * 10**9", "f'{1:>999999999}'",
        "eval('1')", "exit()",
        "print(1)", "1 if 1 else 2", "1 and 2", "1 < 2 < 3", "{1: 2}", "a = 1", "import os", "while 1: pass",
        "0x" + "f" * 99, "1_000", "1j**1j", "True + True", "None", "~1", "1 << 10**9", "5 % 3", "5 @ 3", "1; 2", "1\n2",
        "# 1", "\\", "\ud800",
    ]  # fmt: skip
    return powers + towers + roots + products + deep + code


def test_hostile_expressions_are_refused_or_calculated_in_two_seconds():
    expressions = hostile_expressions()
    start = time.process_time()
    results = [calculate(expression) for expression in expressions]
    assert time.process_time() - start < 2
    for expression, result in zip(expressions, results, strict=True):
        assert result.startswith("Error: ") or Decimal(result).is_finite(), (expression, result)
        assert len(result) < 150

    def at_depth(depth: int) -> str:
        return calculate("-" * 150 + "1") if depth == 0 else at_depth(depth - 1)

    # Near the limit of Python's stack the expression is too much, which is the result and no exception.
    assert at_depth(0) == "1" and {at_depth(depth) for depth in (400, 800)} <= {"1", NO_EXPRESSION}


def written(parts: tuple) -> tuple[str, Fraction | None]:
    """An operation as text, and its value; None where zero divides."""
    (left, a), sign, (right, b) = parts
    if a is None or b is None or (sign == "/" and b == 0):
        return f"({left}{sign}{right})", None
    return f"({left}{sign}{right})", {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]


@pytest.mark.slow
@given(
    st.recursive(
        (st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)).map(lambda text: (text, Fraction(text))),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(written),
        max_leaves=8,
    )
)
def test_values_are_those_of_fractions(expression):
    text, value = expression
    if value is None:
        assert calculate(text) == BY_ZERO
    else:
        assert abs(Fraction(calculate(text)) - value) <= Fraction(1, 2 * 10**10)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("6*12", True), ("6 x 12", True), ("(6)-1", True), ("$6+1", True), ("2^3", True), ("72", False), ("-72", False),
     ("--72", False), ("(72)", False), ("1e-5", False), ("six", False), ("", False), ("$72 =", False)],
)  # fmt: skip
def test_a_number_alone_is_nothing_to_calculate(expression, expected):
    assert has_operation(expression) is expected
