"""Whether a boxed answer equals another, by math-verify. Without torch, as workers load it."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from grpo_rl.envs.tags import last_boxed

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
_SPACES_AROUND = re.compile(r"^(?:\s|\\[,;:! ]|~)+|(?:\s|\\[,;:! ]|~)+$")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)(?![a-zA-Z])")
MAX_FUNCTIONS = 6
"""In one answer; sympy simplifies what is nested deeper for minutes."""
MAX_NESTING = 6
_INTEGER = re.compile(r"\s*-?[0-9]+\s*")
_BASE = re.compile(r"\s*[0-9]+\s*_\s*\{?\s*([0-9]+)\s*\}?\s*")


def equal(gold: str, answer: str | None) -> bool | None:
    r"""Whether the answer equals the gold answer, both as LaTeX without their box; None if the gold can't be parsed.

    A gold answer that math-verify only knows as a text would make every other way to write it wrong.

    Two things math-verify is helped with. It does not look at the base of ``52_8``: an answer in another base than the
    gold answer's, or in none, is wrong here. And with the ANTLR that Hydra needs it can't read percents: ``28\%`` is
    28/100, and either side may leave the sign out, as other units; the gold answer only where it is a whole number.

    An answer that is left as work to do, which sympy could not finish, is wrong unless the gold answer is written so:
    powers in exponents, huge exponents and factorials, sums, integrals, limits, and what is nested very deep.

    Has no deadline: sympy may still take for ever. What it fails on, in any way, counts as not equal: nearly always it
    is the answer that makes no sense.

    >>> equal(r"\frac{1}{2}", "0.5"), equal(r"\frac{1}{2}", "0.4"), equal("", "0.5")
    (True, False, None)
    """
    gold = _PERCENT_SIGN.sub("%", gold)
    golds = _parsed(gold)
    if all(isinstance(reading, str) for reading in golds):
        return None
    if answer is None:
        return False
    if _bare(answer) == _bare(gold):
        return True
    if _is_unbounded(answer) and not _is_unbounded(gold):
        return False
    answer = _PERCENT_SIGN.sub("%", answer)
    base, gold_base = _BASE.fullmatch(answer), _BASE.fullmatch(gold)
    if (base and (gold_base is None or gold_base[1] != base[1])) or (gold_base and _INTEGER.fullmatch(answer)):
        return False
    if "%" in gold and "%" not in answer and _verified(_parsed(gold.replace("%", "")), answer):
        return True
    if "%" in answer and _INTEGER.fullmatch(gold) and _verified(golds, answer.replace("%", "")):
        return True
    return _verified(golds, answer)


def _bare(latex: str) -> str:
    r"""Without what nobody sees: spaces around it, and braces around all of it.

    >>> _bare(r" {\frac{1}{2}}\, "), _bare(r"{a}^{b}")
    ('\\frac{1}{2}', '{a}^{b}')
    """
    latex = _SPACES_AROUND.sub("", latex)
    while latex.startswith("{") and last_boxed(rf"\boxed{latex}") == latex[1:-1].strip():
        latex = _SPACES_AROUND.sub("", latex[1:-1])
    return latex


def _is_unbounded(latex: str) -> bool:
    depth = deepest = 0
    for sign in latex:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    return deepest > MAX_NESTING or len(_FUNCTION.findall(latex)) > MAX_FUNCTIONS or bool(_UNBOUNDED.search(latex))


def _verified(golds: list[Any], answer: str) -> bool:
    return verify(golds, _parsed(answer), timeout_seconds=None)


# The answers to one problem come together, and each needs the gold.
@lru_cache(maxsize=256)
def _parsed(latex: str) -> list[Any]:
    """Its readings: a sympy expression where it is one, and always the text; none if nothing is left of it."""
    latex = _PERCENT.sub(lambda number: rf"\frac{{{number[1].replace(',', '')}}}{{100}}", latex)
    # The first match is all of it: any match would read `\frac{1}{2}` out of an answer that makes no sense.
    return parse(rf"\boxed{{{latex}}}", _TARGETS, extraction_mode="first_match", parsing_timeout=None)
