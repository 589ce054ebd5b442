"""GSM8K: grade-school mathematics in words, judged on the final number of the response."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, means, weight
from grpo_rl.envs.grading import patterns
from grpo_rl.envs.grading.numbers import extract_answer, written
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import GroupTask, Messages, Reward, Unjudgeable, asking, opening

COLUMNS = {"question": str, "answer": str}
CHAT_COLUMNS = {"question": str | list, "answer": str}
HUB_NAME = "openai/gsm8k"
HUB_SPLITS = ("train", "test")
SHIPPED = {
    "quickstart-train": Path(__file__).parent / "data" / "quickstart_train.jsonl",
    "quickstart-test": Path(__file__).parent / "data" / "quickstart_test.jsonl",
}
"""Problem sets that come with the package, by the name that ``env.path`` takes."""

SYSTEM_PROMPT = (
    "Solve the problem. Think inside <reasoning> and </reasoning>, then give the final number inside <answer> and "
    "</answer>."
)
REASONING_PATTERN = r"(?s)^\s*<reasoning>.+?</reasoning>"
ANSWER_PATTERN = r"(?s)<answer>\s*[-+$]*(\d[\d.,]*|\.\d+)\s*</answer>\s*$"


class GSM8K(GroupTask):
    """Grade-school problems; a response earns ``correctness``, ``reasoning_format`` and ``answer_format``.

    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did
    Natalia sell altogether in April and May?" A response that reasons and answers in form, and is right, earns 3:

    >>> row = {"question": "Natalia sold clips to 48 of her friends in April, [...]", "answer": "[...] #### 72"}
    >>> response = "<reasoning>In May 48 / 2 = 24, so 48 + 24 = 72.</reasoning><answer>72</answer>"
    >>> reward = GSM8K([row]).score(row, response)
    >>> reward.total, reward.parts
    (3.0, {'correctness': 2.0, 'reasoning_format': 0.5, 'answer_format': 0.5})

    Rows have ``question``, a text or chat messages, and ``answer``; the gold number is what follows ``####`` in it.
    Patterns are searched in a process of its own, which is killed where it takes too long
    (`grpo_rl.envs.grading.patterns`).

    Raises:
        ValueError: a setting makes no sense, an example lacks a column, or a row's answer has no number.
    """

    reward_parts = ("correctness", "reasoning_format", "answer_format")
    correct_part = "correctness"

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        correctness: Annotated[
            float, weight('the final number (<answer>, ####, \\boxed, "the answer is", else the last) is the gold one')
        ] = 2.0,
        reasoning_format: Annotated[float, weight("the response matches reasoning_pattern")] = 0.5,
        answer_format: Annotated[float, weight("the response matches answer_pattern")] = 0.5,
        reasoning_pattern: Annotated[str, means("searched in the whole response", of_reward=True)] = REASONING_PATTERN,
        answer_pattern: Annotated[str, means("searched in the whole response", of_reward=True)] = ANSWER_PATTERN,
        system_prompt: SystemPrompt = SYSTEM_PROMPT,
        examples: Annotated[
            Sequence[Mapping[str, Any]], means("few-shot turns before the problem: a list of {question, answer}")
        ] = (),
    ) -> None:
        self._weights = dict(zip(self.reward_parts, (correctness, reasoning_format, answer_format), strict=True))
        for name, pattern in (("reasoning_pattern", reasoning_pattern), ("answer_pattern", answer_pattern)):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"env.reward.{name}={pattern!r} is no regular expression: {error}") from error
        self._patterns = (reasoning_pattern, answer_pattern)
        shown = [tables.checked_row(one, COLUMNS, f"env.examples[{i}]") for i, one in enumerate(examples or ())]
        self._before = opening(system_prompt, [(example["question"], example["answer"]) for example in shown])
        self.rows = rows
        check_gold(rows)

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the question."""
        return asking(self._before, row["question"])

    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> list[Reward | Exception]:
        """The rewards of a group, with one search for all its patterns; a TimeoutError where that took too long."""
        formats = patterns.found(self._patterns, responses, (REASONING_PATTERN, ANSWER_PATTERN), self._budget_s)
        return [self._reward(*judged) for judged in zip(rows, responses, formats, strict=True)]

    def _reward(self, row: dict, response: str, formats: list[bool] | Exception) -> Reward | Exception:
        if isinstance(formats, Exception):
            return formats
        right = is_right(response, row["answer"])
        if right is None:
            # Otherwise a response without a number would equal it.
            return Unjudgeable(f"the row's answer has no number: {row['answer'][-80:]!r}; end it on #### N")
        return Reward(self._paid(dict(zip(self.reward_parts, (right, *formats), strict=True))))

    def gold(self, row: dict) -> str | None:
        """The gold number."""
        return gold_number(row)

    def demonstration(self, row: dict) -> str | None:
        """The row's answer: the steps, and the gold number behind ``####``."""
        return row["answer"]

    def final_answers(self, responses: Sequence[str]) -> list[str | None]:
        """The final number of each response, without trailing zeros.

        >>> GSM8K([]).final_answers(["It is 7.", "<answer>7.00</answer>", "42 / 6 =", "No idea."])
        ['7', '7', 'quotient 7', None]
        """
        return [final_number(response) for response in responses]


def is_right(response: str, answer: str) -> bool | None:
    """True if the response's final number is that of the row's answer; None where that has none.

    A quotient is read only where the gold answer is one; elsewhere it is a calculation left undone, and no number:

    >>> is_right("48 / 6 =", "#### 8"), is_right("48 / 6 = 8", "#### 8"), is_right("2/4", "#### 1/2")
    (False, True, True)
    """
    gold = _gold(answer)
    return None if gold is None else extract_answer(response, quotients=_gold(answer, False) is None) == gold


def final_number(response: str) -> str | None:
    """The final number of a response, equal ones written alike; a quotient is another answer than its value."""
    if (number := extract_answer(response, quotients=False)) is not None:
        return written(number)
    quotient = extract_answer(response)
    return None if quotient is None else f"quotient {written(quotient)}"


def load_rows(path: AnySource = None, split: str = "train", chat: bool = True) -> Sequence[dict]:
    """Problems with ``question``, with ``chat`` also messages, and ``answer``, as of `tables.load_rows` or `SHIPPED`.

    >>> load_rows("quickstart-test")[0]["answer"].splitlines()[-1]
    '#### ...'
    """
    source = Source.of(path)
    if source.path in SHIPPED:
        source = replace(source, path=str(SHIPPED[source.path]))
    asked = ("question", "answer") if chat else None
    rows = tables.load_rows(source, split, COLUMNS, chat=asked, hub=f"{HUB_NAME}:main")
    return [tables.checked_row(row, CHAT_COLUMNS if chat else COLUMNS, row.where) for row in rows]


def check_gold(rows: Sequence[dict]) -> None:
    """Raises ValueError unless each row's answer has a number."""
    for index, row in enumerate(rows):
        if extract_answer(row["answer"]) is None:
            where = tables.place_of(rows, index)
            raise ValueError(f"the answer of {where} has no number: {row['answer'][-80:]!r}; end it on #### N")


def gold_number(row: dict) -> str | None:
    """The number of a row's answer, as logs show it; None where it has none."""
    number = extract_answer(row["answer"])
    return None if number is None else f"{number:f}"


# The responses to one question come in one call, and each needs the gold answer.
_gold = lru_cache(maxsize=64)(extract_answer)


GSM8KEnv = TaskSpec(GSM8K, load_rows, hub=HUB_NAME)
"""GSM8K as a TorchRL environment."""
