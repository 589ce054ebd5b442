"""Rewards for a response's text: form (tags, steps, a block of code), length, little repetition, the right answer.

They follow Open-R1, https://github.com/huggingface/open-r1/blob/main/src/open_r1/rewards.py. All but ``accuracy`` take
time linear in the text. Rewards of its length count characters or tokens, all in one unit.
"""

import math
import re
from collections.abc import Sequence
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


def group_length(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """A value for each response to one prompt, from 0.5 for the shortest to -0.5 for the longest.

    A wrong response gets at most 0.

    Source: Kimi k1.5, https://arxiv.org/abs/2501.12599, section 2.3.3, "Length Penalty"; Open-R1's ``length``.

    Args:
        lengths: of the responses to one prompt. Where all are equal, each gets 0.
        correct: whether each response is right.

    >>> group_length([100, 200, 300], [True, True, False])
    [0.5, 0.0, -0.5]
    """
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [share if right else min(0.0, share) for share, right in zip(shares, correct, strict=True)]


def cosine(
    length: int,
    correct: bool,
    *,
    max_len: Annotated[int, Field(ge=1)] = 1000,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    value_exceeded: float | None = None,
) -> float:
    """The best value for a short right response and the worst for a short wrong one, nearing each other with length.

    Between length 0 and ``max_len`` half a wave of a cosine leads from one value to the other: right responses had
    better be short, and wrong ones had better go on thinking.

    Source: "Demystifying Long Chain-of-Thought Reasoning in LLMs", https://arxiv.org/abs/2502.03373, the cosine reward;
    names and values are those of Open-R1's ``cosine``. There the wave turns back past ``max_len``, so that the longest
    responses earn as the shortest; here it stays where it ends.

    Args:
        max_len: where the wave ends.
        min_value_wrong: reward of a wrong response of length 0.
        max_value_wrong: reward of a wrong response of ``max_len``.
        min_value_correct: reward of a right response of ``max_len``.
        max_value_correct: reward of a right response of length 0.
        value_exceeded: reward of a response of ``max_len`` or more, the paper's r_e; None goes on with the wave's end.

    >>> cosine(0, True), cosine(500, True), cosine(1000, True), cosine(0, False)
    (1.0, 0.75, 0.5, -1.0)
    """
    start, end = (max_value_correct, min_value_correct) if correct else (min_value_wrong, max_value_wrong)
    if length >= max_len:
        return end if value_exceeded is None else value_exceeded
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * length / max_len))


def soft_overlong_punishment(length: int, *, max_len: int, cache: int) -> float:
    """0 up to ``max_len - cache``, then evenly down to -1 at ``max_len``, and -1 beyond.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 13, with lengths in tokens and a cache of 4096 below 20480.

    Args:
        max_len: the longest response that is not punished in full.
        cache: how far below it the punishment begins.

    Raises:
        ValueError: the cache is not between 1 and ``max_len``.

    >>> [soft_overlong_punishment(length, max_len=100, cache=20) for length in (80, 85, 100, 101)]
    [0.0, -0.25, -1.0, -1.0]
    """
    if not 1 <= cache <= max_len:
        raise ValueError(f"cache={cache}, max_len={max_len}; the cache must be at least 1 and at most max_len")
    return -min(1.0, max(0, length - (max_len - cache)) / cache) or 0.0
