"""Rewards for a response's form: thinking and answer inside their tags, steps that can be seen, code in a block.

Source of all: Open-R1, https://github.com/huggingface/open-r1/blob/main/src/open_r1/rewards.py. Each takes time linear
in the text, whatever the text.
"""

from __future__ import annotations

import re

_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_BETWEEN_LINES = re.compile(r"\n</think>\n<answer>\n")
_BETWEEN = re.compile(r"</think>\s*<answer>")
_STEP = re.compile(r"Step \d+:|^\d+\.|^[-*]|First,|Second,|Next,|Finally,", re.MULTILINE)


def answer_format(text: str, *, line_breaks: bool = True) -> float:
    r"""1 where the text begins with ``<think>``, goes over into ``<answer>`` and ends with ``</answer>``, else 0.

    Source: Open-R1's ``format``. Its pattern lets anything follow the line of ``</answer>``; here only white space may.

    Args:
        text: of the response.
        line_breaks: whether the tags must stand on lines of their own, as Open-R1's prompt asks.

    >>> answer_format("<think>\n3 + 4 = 7\n</think>\n<answer>\n7\n</answer>")
    1.0
    >>> answer_format("<think>3 + 4 = 7</think> <answer>7</answer>", line_breaks=False)
    1.0
    """
    return float(_answer(text, line_breaks) is not None)


def tag_count(text: str) -> float:
    r"""A quarter for each tag of :func:`answer_format` that the text has exactly once, with its line breaks.

    Source: Open-R1's ``tag_count``.

    >>> tag_count("<think>\n3 + 4 = 7\n</think>\n7")
    0.5
    """
    return sum(text.count(tag) == 1 for tag in _TAGS) / len(_TAGS)


def reasoning_steps(text: str, *, enough: int = 3) -> float:
    r"""The share of ``enough`` steps that can be seen, at most 1.

    A step is ``Step 1:``, a numbered line (``1.``), a bullet (a line that begins with ``-`` or ``*``), or one of
    ``First,``, ``Second,``, ``Next,`` and ``Finally,``.

    Source: Open-R1's ``reasoning_steps``. By its description lines count wherever they stand, by its pattern a numbered
    one in the first line only, and a bullet in any but the first; here the description holds.

    Raises:
        ValueError: ``enough`` is below 1.

    >>> reasoning_steps("First, add 3 and 4.\nFinally, halve it.") == 2 / 3
    True
    """
    if enough < 1:
        raise ValueError(f"enough={enough}; at least 1 step must be asked for")
    return min(1.0, sum(1 for _ in _STEP.finditer(text)) / enough)


def code_format(text: str, *, language: str = "python") -> float:
    r"""1 where the text is in :func:`answer_format` and its answer holds a closed block of ``language``, else 0.

    Source: Open-R1's ``code_format``.

    Raises:
        ValueError: ``language`` is no word.

    >>> code_format("<think>\nAdd.\n</think>\n<answer>\n```python\nprint(3 + 4)\n```\n</answer>")
    1.0
    """
    if not re.fullmatch(r"[\w+#-]+", language):
        raise ValueError(f"language={language!r}; give the word that follows the three backticks, like python")
    answer = _answer(text, line_breaks=True)
    # Without the look-ahead, javascript would pass for java.
    block = rf"```{re.escape(language)}(?![\w+#-]).*?```"
    return float(answer is not None and re.search(block, answer, re.DOTALL) is not None)


def _answer(text: str, line_breaks: bool) -> str | None:
    """The text inside the answer's tags; None where the text is not in form."""
    opening, between, closing = "<think>", _BETWEEN, "</answer>"
    if line_breaks:
        opening, between, closing = "<think>\n", _BETWEEN_LINES, "\n</answer>"
    text = text.rstrip()
    if not (text.startswith(opening) and text.endswith(closing)):
        return None
    end = len(text) - len(closing)
    match = between.search(text, len(opening), end)
    return text[match.end() : end] if match else None
