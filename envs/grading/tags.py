"""The text between the tags of an answer: `<answer>…</answer>`, and LaTeX's boxes."""

import re
import sys
from collections import deque

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_RUN = re.compile(r"[{}\\](?:(?<=\{)\{*|(?<=\})\}*|(?<=\\)[{}\\](?:\\[{}\\])*)")
"""Braces of one kind in a row, or escaped ones and backslashes. It begins with a set, which `re` finds fast."""


def last_answer(text: str) -> str | None:
    """The text inside the last ``<answer>…</answer>``; None where there is none.

    >>> last_answer("<answer>1</answer> or rather <answer> 2 </answer></answer>")
    '2'
    """
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    end = text.find("</answer>", start)  # a second one behind it closes nothing
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def last_boxed(text: str, max_chars: int = sys.maxsize) -> str | None:
    r"""The contents of the last ``\boxed{…}`` or ``\fbox{…}`` of ``text``; None if there is none, or it isn't closed.

    A box in a box is the later one, and one of more than ``max_chars`` is none. Takes time linear in the text, whatever
    the text.

    >>> last_boxed(r"Not \boxed{7}, but $\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    """
    last = deque(_BOX.finditer(text), maxlen=1)
    if not last:
        return None
    start, depth = last[0].end(), 1
    for run in _RUN.finditer(text, start, min(len(text), start + max_chars + 1)):
        first, length = text[run.start()], run.end() - run.start()
        if first == "{":
            depth += length
        elif first == "}" and length >= depth:
            return text[start : run.start() + depth - 1].strip()
        elif first == "}":
            depth -= length
    return None
