"""The last number of an answer, whatever its format."""

from __future__ import annotations

import re
from decimal import Decimal

from grpo_rl.envs.tags import last_answer

_SEPARATOR = r"(?:,|\{,\}|\\,|,\\!|[\u00a0\u2009\u202f])"  # 1,234; LaTeX's 1{,}234, 1\,234 and 1,\!234; narrow spaces
_WHOLE = rf"\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+"
# A point that closes a sentence, or that follows a word or another point, is not a decimal point.
_PLAIN = rf"(?:(?:{_WHOLE})(?:\.\d+)?|(?<![\w.])\.\d+)"
_TOKEN = re.compile(
    # Exponents are taken first and thrown away: "25 cm^2" ends on 25.
    r"\^\{?[-+]?\d+\}?"
    r"|\\[dt]?frac\{(?P<over>\d+)\}\{(?P<under>\d+)\}"
    rf"|(?P<number>{_PLAIN})(?:(?P<exponent>[eE][-+]?\d{{1,3}}(?!\w))| ?/ ?(?P<divisor>{_PLAIN}))?"
)
_KEPT = re.compile(r"[^\d.]")
_MINUS = "-−–－﹣"
_CURRENCY = "$€£¥₹"
_HORIZONTAL = " \t\u00a0\u2009\u202f"


def extract_answer(text: str) -> Decimal | None:
    r"""The number that ``text`` answers with; None if there is none.

    What is judged is the inside of the last ``<answer>…</answer>``, else what follows the last ``####``, else all of
    the text; in it, the last number counts:

    - ``1,234`` is one number and ``3, 4`` are two; ``12.0`` equals 12; the point of ``is 42.`` ends the sentence.
    - Signs of currency, percent and markup (``$5``, ``5€``, ``**42**``, ``\boxed{42}``, ``\$5``) are no part of it.
    - A minus is a sign where it touches the number or its currency (``-3``, ``−3``, ``-$3``, ``$-3``). After an
      operand it is an operator (``3-2``, ``3 -2``), after a word a hyphen (``day-2``), before a space an operator or a
      list's bullet (``- 3``): all these leave the number positive.
    - ``1/2`` and ``\frac{1}{2}`` are worth their quotient: to read the denominator alone would be wrong. A division by
      zero is no number. Mixed numbers (``1 1/2``) are not put together, and powers are not computed.
    - ``1.5e3`` is 1500.

    Takes time linear in the text, whatever the text.

    >>> extract_answer("48 / 2 = 24 and 48 + 24 = 72, so she sold $1,072.50.")
    Decimal('1072.50')
    """
    judged = _judged(text)
    last = None
    for match in _TOKEN.finditer(judged):
        if match["number"] or match["over"]:
            last = match
    if last is None:
        return None
    value = _value(last)
    if value is not None and _is_negative(judged, last.start()):
        # Not `-value`, which would round to the context's 28 digits.
        return value.copy_negate()
    return value


def _judged(text: str) -> str:
    inside = last_answer(text)
    if inside is not None:
        return inside
    return text[text.rfind("####") + len("####") :] if "####" in text else text


def _value(match: re.Match[str]) -> Decimal | None:
    if match["over"]:
        return _quotient(Decimal(match["over"]), Decimal(match["under"]))
    number = _decimal(match["number"])
    if match["divisor"]:
        return _quotient(number, _decimal(match["divisor"]))
    return Decimal(f"{number}{match['exponent']}") if match["exponent"] else number


def _decimal(text: str) -> Decimal:
    return Decimal(_KEPT.sub("", text))


def _quotient(over: Decimal, under: Decimal) -> Decimal | None:
    return over / under if under else None


def _is_negative(text: str, start: int) -> bool:
    """Whether a minus that is a sign stands before the number at ``start``."""
    at = start - 1
    while at >= 0 and text[at] in _CURRENCY + "\\":
        at -= 1
    if at < 0 or text[at] not in _MINUS:
        return False
    before = text[:at]
    if before and (before[-1].isalnum() or before[-1] in ")]}" + _MINUS):
        return False
    # "3 -2", "5% -2" and "5€-2": an operand stands before the minus, on the same line.
    operand = before.rstrip(_HORIZONTAL + _CURRENCY + "%\\")
    return not (operand and (operand[-1].isdigit() or operand[-1] in ")]}"))
