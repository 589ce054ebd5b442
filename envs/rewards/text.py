"""Rewards for a response's text: its form (tags, steps, a block of code), little repetition, and the right answer.

They follow Open-R1, https://github.com/huggingface/open-r1/blob/main/src/open_r1/rewards.py. All but ``accuracy`` take
time linear in the text.
"""

import re
from typing import Annotated

from pydantic import Field

from grpo_rl.envs.task import Unjudgeable

_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_BETWEEN_LINES = re.compile(r"\n</think>\n<answer>\n")
_BETWEEN = re.compile(r"</think>\s*<answer>")
_STEP = re.compile(r"Step \d+:|^\d+\.|^[-*]|First,|Second,|Next,|Finally,", re.MULTILINE)


def answer_format(text: str, *, line_breaks: bool = True) -> float:
    r"""1 where the text begins with ``<think>``, goes over into ``<answer>`` and ends with ``</answer>``, else 0.

    Source: Open-R1's ``format``. Its pattern lets anything follow the line of ``</answer>``; here only white space may.

    Args:
        line_breaks: whether the tags must stand on lines of their own, as Open-R1's prompt asks.

    >>> answer_format("<think>\n3 + 4 = 7\n</think>\n<answer>\n7\n</answer>")
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


def reasoning_steps(text: str, *, enough: Annotated[int, Field(ge=1)] = 3) -> float:
    r"""The share of ``enough`` steps that can be seen, at most 1.

    A step is ``Step 1:``, a numbered line (``1.``), a bullet (a line that begins with ``-`` or ``*``), or one of
    ``First,``, ``Second,``, ``Next,`` and ``Finally,``.

    Source: Open-R1's ``reasoning_steps``. By its description lines count wherever they stand, by its pattern a numbered
    one in the first line only, and a bullet in any but the first; here the description holds.

    >>> reasoning_steps("First, add 3 and 4.\nFinally, halve it.") == 2 / 3
    True
    """
    return min(1.0, sum(1 for _ in _STEP.finditer(text)) / enough)


def code_format(text: str, *, language: Annotated[str, Field(pattern=r"^[\w+#-]+$")] = "python") -> float:
    r"""1 where the text is in :func:`answer_format` and its answer holds a closed block of ``language``, else 0.

    Source: Open-R1's ``code_format``.

    >>> code_format("<think>\nAdd.\n</think>\n<answer>\n```python\nprint(3 + 4)\n```\n</answer>")
    1.0
    """
    answer = _answer(text, line_breaks=True)
    # Without the look-ahead, javascript would pass for java.
    block = rf"```{re.escape(language)}(?![\w+#-]).*?```"
    return float(answer is not None and re.search(block, answer, re.DOTALL) is not None)


def repetition_penalty(
    text: str, *, ngram_size: Annotated[int, Field(ge=1)] = 3, max_penalty: Annotated[float, Field(le=0)] = -1.0
) -> float:
    """``max_penalty`` times the share of n-grams that occurred before; 0 where the text is shorter than one n-gram.

    Words are what white space parts, in lower case: of a text without spaces nothing is seen.

    Source: "Demystifying Long Chain-of-Thought Reasoning in LLMs", https://arxiv.org/abs/2502.03373, appendix C.2, as a
    penalty of the whole response: Open-R1's ``repetition_penalty``.

    Args:
        ngram_size: words in an n-gram.
        max_penalty: what a text of one n-gram without end would earn.

    Six bigrams, of which "this is" and "is a" come twice:

    >>> repetition_penalty("this is a this is a test", ngram_size=2, max_penalty=-3.0)
    -1.0
    """
    words = text.lower().split()
    total = len(words) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = len(set(zip(*(words[start:] for start in range(ngram_size)), strict=False)))
    return max_penalty * (total - distinct) / total or 0.0


def accuracy(text: str, gold: str | None) -> float:
    r"""1 where the text's last boxed answer equals ``gold`` as mathematics, else 0.

    The judge is `grpo_rl.envs.grading.verification.verify`.

    Source: Open-R1's ``accuracy``. There LaTeX outside a box counts too where there is no box, and a gold answer that
    can't be parsed earns 1 in some versions; here it is no reward at all.

    Raises:
        Unjudgeable: there is no gold answer, or it can't be parsed.

    >>> accuracy(r"So it is \boxed{\frac{126}{800}}.", r"\frac{63}{400}")
    1.0
    """
    # Imported here: it brings math-verify, which the other rewards need not wait for.
    from grpo_rl.envs.grading.verification import verify

    if gold is None:
        raise Unjudgeable("the row has no gold answer")
    verdict = verify(gold, text)
    if verdict is None:
        raise Unjudgeable(f"the gold answer can't be parsed: {gold[:80]!r}")
    return float(verdict)


def _answer(text: str, line_breaks: bool) -> str | None:
    opening, between, closing = "<think>", _BETWEEN, "</answer>"
    if line_breaks:
        opening, between, closing = "<think>\n", _BETWEEN_LINES, "\n</answer>"
    text = text.rstrip()
    if not (text.startswith(opening) and text.endswith(closing)):
        return None
    end = len(text) - len(closing)
    match = between.search(text, len(opening), end)
    return text[match.end() : end] if match else None
