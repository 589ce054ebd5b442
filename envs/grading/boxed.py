"""Equality of boxed answers, by math-verify. Without torch, as workers load it."""

import logging
import re
from functools import lru_cache
from itertools import accumulate, product
from math import comb, prod
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from grpo_rl.envs.grading.tags import last_boxed

# It logs every answer that it can't compare, with a traceback: to a policy's samples that is the ordinary case.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

# No ExprExtractionConfig: it hands text to sympy's parse_expr, which evaluates it.
_TARGETS = (LatexExtractionConfig(boxed_match_priority=0),)
_PERCENT_SIGN = re.compile(r"\s*(?:\\?%|\\(?:text|mbox|mathrm)\{\s*percent\s*\}|\bpercent\b)")
_PERCENT = re.compile(r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)%")
# What takes sympy for ever, or all memory, to give a value to.
_UNBOUNDED = re.compile(
    r"""
    \^\s*\{[^{}]*\^              # a power in an exponent
    | \^\s*\{?[\s(]*-?\d{4}      # an exponent in the thousands
    | \d[eE]\+?\d{4}
    | [})]\s*\^\s*\{?[\s(]*([2-9]\d|\d{3})  # likewise of a matrix, or of a sum
    | \d{4}\s*!|[!)}]\s*!       # factorials of thousands, and of terms
    | \\(?:sum|prod|int|lim|mod|pmod|bmod|gcd)(?![a-zA-Z])
    | \\[dt]?binom\W*\d{3} | \\[dt]?binom[^a-zA-Z]*\^
    """,
    re.VERBOSE,
)
# Behind a comma only the narrow `\!`: wider spaces are those between the elements of a list.
_THOUSANDS = re.compile(r"(?<=\d)(?:,\\!|(?<!,)\\[,;:! ]|~|\{,\})\s*(?=\d{3}(?!\d))")
# Signs of an equation of two numbers that are written, or counted, in different ways.
_OTHER_WAYS = re.compile(r"_|%|\\circ|\\degree|\\equiv|\\bmod|\\pmod|\\approx")
_DECIMALS = re.compile(r"\.(\d+)")
# Not that of an ellipsis, nor of `\right.`, which closes a bracket.
_FULL_STOP = re.compile(r"(?<![.\s])(?<!\\right)(?<!\\left)\s*\.\s*$")
# The number i as math-verify's `complex_number_pattern` has it, and e: behind a number it takes `\text{i}` for a unit.
_LETTER = re.compile(
    r"(?:(\\[a-zA-Z]+)\s*)?(?:\\(?:math(?:rm|it)|text(?:rm|it|normal)?|mbox|operatorname)\s*\{\s*([ei])\s*\}"
    r"|\{\s*\\rm\s+([ei])\s*\}|\\(i)(?:math)?(?![a-zA-Z]))(?!\s*_)"
)
# math-verify has two symbols, that of `4\cdot i` and that of `4i`, where it finds no boundary of a word.
_JOINED_I = re.compile(r"(?<=\d)i(?![a-zA-Z])")
_SIGN = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])|[±∓]")
MAX_SIGNS = 3
"""The most signs ``\\pm`` in one answer of which each choice is written out."""
_IN_SET = re.compile(r"(?<=\\\{)(?:(?!\\\{).)*?(?=(?:\\right)?\\\})", re.DOTALL)
_SPACES_AROUND = re.compile(r"^(?:\s|\\[,;:! ]|~)+|(?:\s|\\[,;:! ]|~)+$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)(?![a-zA-Z])")
MAX_FUNCTIONS = 6
"""The most functions in one answer; sympy simplifies what is nested deeper for minutes."""
MAX_NESTING = 6
MAX_TERMS = 64
"""The most terms in one answer once it is expanded, which sympy does to compare it, at 2 ms a term."""
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\s+|.", re.DOTALL)
_DIGITS = re.compile(r"\d+")
# An exponent: what stands in braces, up to two deep, else digits, else a command with what may be its arguments.
_POWER = re.compile(r"\s*\^\s*(?:\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|[+-]?\d+|\\[a-zA-Z]+[\s{}\d]*|[^\s{}])")
_MAX_EXPONENT = 1000
_INTEGER = re.compile(r"\s*-?[0-9]+\s*")
_BASE = re.compile(r"\s*[0-9]+\s*_\s*\{?\s*([0-9]+)\s*\}?\s*")


def equal(gold: str, answer: str | None) -> bool | None:
    r"""True if the answer equals the gold answer, both as LaTeX without box; None if the gold can't be parsed.

    A gold answer that math-verify only reads as a text would make every other way to write it wrong.

    Four things are worked around in math-verify. It takes the letter of ``4\mathrm{i}`` for a unit, where it is i, and
    likewise e. It reads a ``\pm`` between two terms alone, and none in a fraction. It does not look at
    the base of ``52_8``: an answer in another base than the gold answer's, or in none, is wrong here. And with the
    ANTLR that Hydra needs it can't read percents: ``28\%`` is 28/100, and either side may leave the sign out, as other
    units; the gold answer only where it is a whole number.

    An answer that is left as work to do, which sympy could not finish, is wrong unless the gold answer is written so:
    powers in exponents, huge exponents and factorials, sums, integrals, limits, powers and products of sums that expand
    to more than :data:`MAX_TERMS` terms, and what is nested very deep.

    math-verify takes the right side of an equation. One that says that two different numbers are equal, as ``1=72``, is
    wrong. A full stop behind an answer is no part of it, nor are spaces within a number, as in ``1\,000``.

    Has no deadline: sympy may still take for ever. What it fails on, in any way, counts as not equal: nearly always it
    is the answer that makes no sense.

    >>> equal(r"\frac{1}{2}", "0.5"), equal(r"\frac{1}{2}", "0.4"), equal("", "0.5")
    (True, False, None)
    """
    gold = _PERCENT_SIGN.sub("%", _tidy(gold))
    golds = _parsed(gold)
    if all(isinstance(reading, str) for reading in golds):
        return None
    if answer is None:
        return False
    answer = _tidy(answer)
    if _bare(answer) == _bare(gold):
        return True
    if is_unbounded(answer) and not is_unbounded(gold):
        return False
    answer = _PERCENT_SIGN.sub("%", answer)
    if _contradicts(answer):
        return False
    base, gold_base = _BASE.fullmatch(answer), _BASE.fullmatch(gold)
    if (base and (gold_base is None or gold_base[1] != base[1])) or (gold_base and _INTEGER.fullmatch(answer)):
        return False
    if "%" in gold and "%" not in answer and _verified(_parsed(gold.replace("%", "")), answer):
        return True
    if "%" in answer and _INTEGER.fullmatch(gold) and _verified(golds, answer.replace("%", "")):
        return True
    return _verified(golds, answer)


def _bare(latex: str) -> str:
    r"""The answer without what is not visible: spaces around it, and braces around all of it.

    >>> _bare(r" {\frac{1}{2}}\, "), _bare(r"{a}^{b}")
    ('\\frac{1}{2}', '{a}^{b}')
    """
    latex = _SPACES_AROUND.sub("", latex)
    while latex.startswith("{") and last_boxed(rf"\boxed{latex}") == latex[1:-1].strip():
        latex = _SPACES_AROUND.sub("", latex[1:-1])
    return latex


def _tidy(latex: str) -> str:
    r"""The answer without a full stop at its end, spaces in its numbers, and a font of its own for i and e.

    >>> _tidy(r"1\,000."), _tidy(r"3\cdot\mathrm{i}"), _tidy(r"\left\{1, 2\right."), _tidy("1, 2, ...")
    ('1000', '3\\cdot i', '\\left\\{1, 2\\right.', '1, 2, ...')
    """
    latex = _JOINED_I.sub(" i", _LETTER.sub(_plain_letter, latex))
    return _FULL_STOP.sub("", _THOUSANDS.sub("", latex))


def _plain_letter(found: re.Match[str]) -> str:
    command, *letters = found.groups(default="")
    return f"{command} " * bool(command) + "".join(letters)


def _both_signs(latex: str) -> str:
    r"""The list of the answer's readings, one for each choice of its signs; those of a set inside its braces.

    With a ``\mp`` among them all are upper signs, or all are lower ones.

    >>> _both_signs(r"x=\frac{1\pm\sqrt{5}}{2}"), _both_signs(r"\{1\pm x\mp y,2\}")
    ('x=\\frac{1+\\sqrt{5}}{2},x=\\frac{1-\\sqrt{5}}{2}', '\\{1+ x- y,2,1- x+ y,2\\}')
    """
    if r"\{" in latex:
        return _IN_SET.sub(lambda content: _both_signs(content[0]), latex)
    signs = ["+-"[sign in (r"\mp", "∓")] for sign in _SIGN.findall(latex)]
    if not 0 < len(signs) <= MAX_SIGNS:
        return latex
    together = [signs, ["-+"[sign == "-"] for sign in signs]]
    choices = together if "-" in signs else product("+-", repeat=len(signs))
    first, *rest = _SIGN.split(latex)
    return ",".join(first + "".join(map(str.__add__, choice, rest)) for choice in choices)


def is_unbounded(latex: str) -> bool:
    """True if an answer is left as work to do, which sympy could not finish (:func:`equal` lists the kinds)."""
    depths = accumulate((sign in "{([") - (sign in "})]") for sign in latex)
    return (
        max(depths, default=0) > MAX_NESTING
        or latex.count("|") > 2 * MAX_NESTING
        or len(_FUNCTION.findall(latex)) > MAX_FUNCTIONS
        or bool(_UNBOUNDED.search(latex))
        or _expanded_terms(latex) > MAX_TERMS
    )


def _expanded_terms(latex: str) -> int:
    r"""At least as many terms as ``latex`` has when its powers and products of sums are multiplied out.

    A sum of n terms to the power k has $\binom{n+k-1}{k}$ of them, if no two are the same.

    >>> _expanded_terms(r"(x+y+z)^{2} - \frac{a+b}{2}"), _expanded_terms("(x+y+z+w+a+b)^{19}")
    (8, 42504)
    """
    frames = [(0, 0)]  # of each open bracket: the terms before the one at hand, and that one's; 0 where it is empty
    at = 0
    while at < len(latex):
        token = _TOKEN.match(latex, at)
        assert token  # anything matches
        at, sign = token.end(), token[0]
        before, term = frames[-1]
        if sign in "{([":
            frames.append((0, 0))
        elif sign in "})]" and len(frames) > 1:
            frames.pop()
            terms = max(1, before + term)
            while power := _POWER.match(latex, at):
                at = power.end()
                exponent = min(_MAX_EXPONENT, prod(max(1, int(number[:4])) for number in _DIGITS.findall(power[0])))
                terms = comb(terms + exponent - 1, exponent)
            outer, factor = frames[-1]
            frames[-1] = (outer, max(1, factor) * terms)
        elif sign in "+-−,;&=<>" or sign in ("\\\\", "\\pm", "\\mp"):
            frames[-1] = (before + term, 0)
        elif not sign.isspace():
            frames[-1] = (before, max(1, term))
    return sum(before + term for before, term in frames)


def _verified(golds: list[Any], answer: str) -> bool:
    return verify(golds, _parsed(answer), timeout_seconds=None)


def _contradicts(latex: str) -> bool:
    r"""True if an equation says that two different rational numbers are equal.

    Decimals may be rounded or cut off, as in ``\frac{1}{3}=0.33``. Other numbers are no proof, nor is an equation with
    a base, a percent sign, degrees or a congruence.

    >>> _contradicts("1=72"), _contradicts(r"\frac{22}{7}=3.14"), _contradicts("111_2=7")
    (True, False, False)
    """
    if "=" not in latex or _OTHER_WAYS.search(latex):
        return False
    decimals = [len(digits) for digits in _DECIMALS.findall(latex)]
    tolerance = sympy.Rational(1, 10 ** min(decimals)) if decimals else sympy.Integer(0)
    return any(_differ(reading, tolerance) for reading in _parsed(latex))


def _differ(reading: Any, tolerance: sympy.Rational) -> bool:
    if isinstance(reading, (sympy.FiniteSet, sympy.Tuple)):
        return any(_differ(part, tolerance) for part in reading.args)
    equations = reading.args if isinstance(reading, sympy.And) else [reading]
    sides = [side for equation in equations if isinstance(equation, sympy.Eq) for side in equation.args]
    numbers = [_rational(side) for side in sides if side.is_number and not side.has(sympy.Function)]
    known = [number for number in numbers if number is not None]
    return any(abs(number - known[0]) > tolerance for number in known[1:])


def _rational(side: Any) -> sympy.Rational | None:
    r"""The value of a sum, product or quotient of integers and decimals; None for others, as for roots and ``\pi``."""
    value = side.doit()
    number = sympy.Rational(str(value)) if isinstance(value, (sympy.Rational, sympy.Float)) else None
    return number if isinstance(number, sympy.Rational) else None  # not where it is NaN or infinite


# The responses to one problem come in one call, and each needs the gold answer.
@lru_cache(maxsize=256)
def _parsed(latex: str) -> list[Any]:
    """The readings of an answer: a sympy expression where it is one, and the text, unless nothing is left of it."""
    latex = _PERCENT.sub(lambda number: rf"\frac{{{number[1].replace(',', '')}}}{{100}}", latex)
    latex = _both_signs(latex)
    # The first match is all of it: any match would read `\frac{1}{2}` out of an answer that makes no sense.
    return parse(rf"\boxed{{{latex}}}", _TARGETS, extraction_mode="first_match", parsing_timeout=None)
