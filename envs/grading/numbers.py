"""The number that a response gives as its answer, whatever its format."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from itertools import islice

from grpo_rl.envs.grading.tags import last_answer, last_boxed

_SEPARATOR = r"(?:,|\{,\}|\\,|,\\!|[\u00a0\u2009\u202f])"  # 1,234; LaTeX's 1{,}234, 1\,234 and 1,\!234; narrow spaces
_WHOLE = rf"\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+"
# A point that closes a sentence, or that follows a word or another point, is not a decimal point.
_PLAIN = rf"(?:(?:{_WHOLE})(?:\.\d+)?|(?<![\w.])\.\d+)"
_TOKEN = re.compile(
    # Exponents are taken first and thrown away: "25 cm^2" ends on 25.
    r"\^\{?[-+]?\d+\}?"
    r"|\\[dt]?frac\s*(?P<over>\{\d+\}|\d)\s*(?P<under>\{\d+\}|\d)"
    rf"|(?P<number>{_PLAIN})(?:(?P<exponent>[eE][-+]?\d{{1,3}}(?!\w))| ?/ ?(?P<divisor>{_PLAIN}))?"
)
# Four of them. A line behind that begins with a word and does not end on a number is a heading of Markdown.
_HASHES = re.compile(r"(?<!#)####(?!#)(?![^\S\n]*+[*_]*+[^\W\d_][^\n#]*+(?<!\d)(?<!\d[.*)}%€ ])(?<!\d\*\*))")
# Written with both cases, not with IGNORECASE, which would try it at each letter.
_PHRASE = re.compile(r"(?<![^\W_])[aA](?:nswer|NSWER)[\s*_]*+(?:(?:is|IS)\b|[:=])")
# The rest of a number's side of an equation, and the sign, on one line: no word and no end of a sentence is in it.
_EQUATES = re.compile(r"(?:[^\S\r\n]|[\d+*/×÷·xX()$%^\u2212–-]|\.(?=\d)|(?<=\d),(?=\d)|\\(?:times|cdot|div))*+=")
_KEPT = re.compile(r"[^\d.]")
_MINUS = "-−–－﹣"
_CURRENCY = "$€£¥₹"
_HORIZONTAL = " \t\u00a0\u2009\u202f"
# The default context rounds to 28 digits, and has no number of more than a million.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


def extract_answer(text: str, quotients: bool = True) -> Decimal | None:
    r"""The number that ``text`` answers with; None if there is none.

    Args:
        quotients: whether ``48 / 6`` is 8; else it is a calculation left undone, and no number.

    Where the answer stands is looked for in this order, and what is found first decides, even if no number is there:

    1. inside the last closed ``<answer>…</answer>``;
    2. behind the last ``####``, unless its line begins with a word and does not end on a number, as a heading;
    3. inside the last ``\boxed{…}``;
    4. behind the last "answer is" or "answer:" that a number follows;
    5. anywhere: the last number of the text.

    It is the order of lm-eval's GSM8K, whose strict match precedes its flexible one, with the two other markers that
    models are taught. The last marker of its kind counts, so that listing candidates gains nothing:

    - Behind an open marker (2, 4) the first number counts, as chatter may follow: ``#### 3`` with "This took 2 steps."
      in the next line is 3. Behind ``####`` that is the first line that is not empty.
    - Inside a closed marker (1, 3) all is the answer: ``<answer>41 or 42</answer>`` holds two numbers, and so none.
    - In both, an equation answers with its right side: ``#### 7 + 5 = 12`` is 12.

    How a number is read:

    - ``1,234`` is one number and ``3, 4`` are two; ``12.0`` equals 12; the point of ``is 42.`` ends the sentence.
    - Signs of currency, percent and markup (``$5``, ``5€``, ``**42**``, ``\$5``) are no part of it.
    - A minus is a sign where it touches the number or its currency (``-3``, ``−3``, ``-$3``, ``$-3``). After an
      operand it is an operator (``3-2``, ``3 -2``), after a word a hyphen (``day-2``), before a space an operator or a
      list's bullet (``- 3``): all these leave the number positive.
    - ``1/2``, ``\frac{1}{2}`` and ``\frac12`` are worth their quotient, if at all: to read the denominator alone would
      be wrong. A division by zero is no number. Mixed numbers (``1 1/2``) are not put together, and powers are not
      computed.
    - ``1.5e3`` is 1500.

    Takes time linear in the text, whatever the text.

    >>> extract_answer("48 / 2 = 24 and 48 + 24 = 72, so she sold $1,072.50.")
    Decimal('1072.50')
    """
    closed = last_answer(text)
    if closed is None:
        if hashes := deque(_HASHES.finditer(text), maxlen=1):
            return _first(text[hashes[0].end() :].lstrip().partition("\n")[0], quotients)
        closed = last_boxed(text)
    if closed is not None:
        return _only(closed, quotients)
    last = deque(_numbers(text), maxlen=1)
    if not last:
        return None
    phrase = deque(_PHRASE.finditer(text, 0, last[0].start()), maxlen=1)
    return _first(text[phrase[0].end() :], quotients) if phrase else _read(text, last, quotients)


def written(number: Decimal) -> str:
    """The number without trailing zeros, so that equal ones are written alike and others are not.

    >>> written(Decimal("7.00")), written(Decimal("1e3")), written(Decimal("-0"))
    ('7', '1000', '0')
    """
    return f"{number.normalize(_EXACT):f}" if number else "0"


def _only(text: str, quotients: bool) -> Decimal | None:
    """The number that is all of ``text``'s statement; None where it holds none, or several that differ."""
    return _read(text, list(_numbers(text, _stated(text))), quotients)


def _first(text: str, quotients: bool) -> Decimal | None:
    return _read(text, list(islice(_numbers(text, _stated(text)), 1)), quotients)


def _read(text: str, numbers: Sequence[re.Match[str]], quotients: bool) -> Decimal | None:
    """The one value of these numbers; None if there are several, or it is that of a division left undone."""
    values = {_signed(text, number) for number in numbers}
    done = quotients or not all(number["over"] or number["divisor"] for number in numbers)
    return values.pop() if done and len(values) == 1 else None


def _stated(text: str) -> int:
    """Start of what ``text`` states: behind the last sign of the equation that its first number is in."""
    start = 0
    if "=" not in text:
        return start
    while (number := next(_numbers(text, start), None)) and (equation := _EQUATES.match(text, number.end())):
        start = equation.end()
    return start


def _numbers(text: str, start: int = 0) -> Iterator[re.Match[str]]:
    return (match for match in _TOKEN.finditer(text, start) if match["number"] or match["over"])


def _signed(text: str, match: re.Match[str]) -> Decimal | None:
    value = _value(match)
    if value is not None and _is_negative(text, match.start()):
        # Not `-value`, which would round to the context's 28 digits.
        return value.copy_negate()
    return value


def _value(match: re.Match[str]) -> Decimal | None:
    if match["over"]:
        return _quotient(*(Decimal(match[side].strip("{}")) for side in ("over", "under")))
    number = Decimal(_KEPT.sub("", match["number"]))
    if match["divisor"]:
        return _quotient(number, Decimal(_KEPT.sub("", match["divisor"])))
    return Decimal(f"{number}{match['exponent']}") if match["exponent"] else number


def _quotient(over: Decimal, under: Decimal) -> Decimal | None:
    return over / under if under else None


def _is_negative(text: str, start: int) -> bool:
    """True if a minus that is a sign stands before the number at ``start``."""
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
