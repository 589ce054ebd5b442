"""The text between the tags of an answer: `<answer>…</answer>`, and LaTeX's boxes."""

from __future__ import annotations

import re
import sys

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


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
    last = [None, *_BOX.finditer(text)][-1]
    if last is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, last.end(), min(len(text), last.end() + max_chars + 1)):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[last.end() : brace.start()].strip()
    return None
