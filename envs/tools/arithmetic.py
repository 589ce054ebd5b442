"""The value of an expression that a model wrote, exact, bounded and never run as code; and generated problems."""

import ast
import math
import operator
import random
import re
import time
from collections.abc import Callable
from fractions import Fraction

from simpleeval import InvalidExpression, SimpleEval

Numbers = tuple[int, ...]

_WORDS = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}", "/": "divide by {}"}
COMPUTE: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__,
}  # fmt: skip

MAX_EXPRESSION_CHARS = 200
MAX_DIGITS = 30
"""The most digits of a result before its point."""
DECIMALS = 10
"""The most digits of a result behind its point."""
MAX_BITS = 1024
"""The most bits of a numerator or denominator on the way."""

_SIGNS = frozenset("0123456789.eE+-*/() ")
_SPELLINGS = str.maketrans(
    {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "[": "(", "]": ")", "$": "", "€": "", "£": ""}
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TIMES = re.compile(r"(?<=[\d)]) ?[xX] ?(?=[\d(.])")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_OPERATION = re.compile(r"[\d.)] *[-+*/]")


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it, from ``Error: `` on; no text makes it raise.

    Numbers, ``+ - * / // **`` and brackets, in exact fractions; shown with up to ten decimals. ``×``, ``^``, ``3 x 4``,
    ``1,234`` and ``$5`` are understood, and ``=`` with all that follows it is left out. Time and length are bounded,
    whatever the expression.

    >>> calculate("0.1 + 0.2"), calculate("(1,200 - 16) / 7"), calculate("9**3999999")
    ('0.3', '169.1428571429', 'Error: the numbers get too large')
    >>> calculate("sqrt(16)")
    "Error: can't read 's'; use numbers, + - * / ** and brackets, such as 3*(4+5)"
    """
    try:
        value = value_of(_normalised(expression))
        if abs(value) >= 10**MAX_DIGITS:
            raise OverflowError
        return _shown(value)
    except ZeroDivisionError:
        return "Error: division by zero"
    except OverflowError:
        return "Error: the numbers get too large"
    except Unreadable as error:
        return f"Error: {error}; use numbers, + - * / ** and brackets, such as 3*(4+5)"


def has_operation(expression: str) -> bool:
    """True if there is something to calculate.

    >>> has_operation("6*12"), has_operation("-72"), has_operation("six times twelve")
    (True, False, False)
    """
    try:
        return _OPERATION.search(_normalised(expression)) is not None
    except Unreadable:
        return False


class Unreadable(Exception):
    """An expression can't be computed; the message is the reason, for the model."""


def _normalised(expression: str) -> str:
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise Unreadable(f"the expression has {len(expression)} characters, at most {MAX_EXPRESSION_CHARS}")
    text = " ".join(expression.translate(_SPELLINGS).partition("=")[0].split())
    text = _LEADING_ZEROS.sub("", _TIMES.sub("*", _THOUSANDS.sub("", text)))
    if not text:
        raise Unreadable("the expression is empty")
    if "%" in text:
        raise Unreadable("there is no %, write 20/100 for 20%")
    if unknown := next((sign for sign in text if sign not in _SIGNS), None):
        raise Unreadable(f"can't read {unknown!r}")
    return text


def value_of(text: str) -> Fraction:
    """The value of an expression in Python's spelling, of numbers, operators and round brackets.

    Raises:
        Unreadable: it is no such expression.
        ZeroDivisionError: it divides by zero.
        OverflowError: a number on the way has more than :data:`MAX_BITS`.
    """
    try:
        return _EVALUATOR.eval(text)
    except (InvalidExpression, SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable("that is no arithmetic expression") from None


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    if abs(value) < Fraction(1, 10**6):
        return f"{float(value):.{DECIMALS}g}"
    whole, part = divmod(round(abs(value) * 10**DECIMALS), 10**DECIMALS)
    return f"{'-' if value < 0 else ''}{whole}.{part:0{DECIMALS}d}".rstrip("0").rstrip(".")


def _bounded(operation: Callable[..., Fraction | int]) -> Callable[..., Fraction]:
    """The operation, refusing results that would make the next one slow."""

    def bounded(*numbers: Fraction) -> Fraction:
        result = Fraction(operation(*numbers))
        if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
            raise OverflowError
        return result

    return bounded


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 1:
        # Before computing. simpleeval's own bound, an exponent of 4,000,000, lets one power take over a second.
        if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
            raise OverflowError
        return base**exponent.numerator
    if base < 0:
        raise Unreadable("a negative number has no such power")
    return _exact(float(base) ** float(exponent))


def _exact(number: float) -> Fraction:
    if math.isinf(number):
        raise OverflowError
    # By its decimals: 0.1 is a tenth, not the float nearest to it.
    return Fraction(repr(number))


def _constant(node: ast.Constant) -> Fraction:
    if type(node.value) not in (int, float):
        raise Unreadable("that is no arithmetic expression")
    return _NUMBERS[type(node.value)](node.value)


_NUMBERS = {int: _bounded(Fraction), float: _bounded(_exact)}
_OPERATORS = {
    ast.Add: _bounded(operator.add),
    ast.Sub: _bounded(operator.sub),
    ast.Mult: _bounded(operator.mul),
    ast.Div: _bounded(operator.truediv),
    ast.FloorDiv: _bounded(operator.floordiv),
    ast.Pow: _bounded(_power),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class _Evaluator(SimpleEval):
    """Numbers and operators alone: simpleeval refuses every kind of node that it has no entry for."""

    def __init__(self) -> None:
        super().__init__(operators=_OPERATORS, functions={}, names={})
        self.nodes = {kind: self.nodes[kind] for kind in (ast.Expr, ast.BinOp, ast.UnaryOp)}
        self.nodes[ast.Constant] = _constant

    @staticmethod
    def parse(expr: str) -> ast.AST:
        """The expression's syntax tree.

        Python 3.11 counts how deep a tree is for all threads together, and gets a wrong count where two parse at a
        time, here or in a library (SystemError: AST constructor recursion depth mismatch).
        """
        while True:
            try:
                return SimpleEval.parse(expr)
            except SystemError as error:
                if "recursion depth mismatch" not in str(error):
                    raise
                time.sleep(0.001)


# One for all threads. It keeps nothing but the last expression, for messages that no one sees; but to make one changes
# Python's warning filters for a moment, which other threads would meet.
_EVALUATOR = _Evaluator()


def solution(numbers: Numbers, operators: str) -> str:
    r"""The steps, one equation a line, and the gold number.

    >>> solution((3, 6, 4), "*+")
    '3 * 6 = 18\n18 + 4 = 22\n#### 22'
    """
    value, lines = numbers[0], []
    for sign, number in zip(operators, numbers[1:], strict=True):
        result = COMPUTE[sign](value, number)
        lines.append(f"{value} {sign} {number} = {result}")
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
