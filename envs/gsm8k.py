"""GSM8K: grade-school mathematics in words, judged on the final number of the answer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_rl.envs.base import LLMEnv, Messages, Reward, Task
from grpo_rl.envs.grading import patterns
from grpo_rl.envs.grading.numbers import extract_answer
from grpo_rl.envs.task import check_weights

__all__ = ["GSM8K", "GSM8KEnv", "extract_answer", "load_rows"]

COLUMNS = ("question", "answer")
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


class GSM8K(Task):
    """Grade-school problems; an answer earns ``correctness``, ``reasoning_format`` and ``answer_format``.

    Args:
        rows: ``question`` and ``answer``; the gold number is what follows ``####`` in the answer.
        correctness: paid where the answer's final number equals the gold number (see :func:`extract_answer`).
        reasoning_format: paid where ``reasoning_pattern`` is found in the answer.
        answer_format: paid where ``answer_pattern`` is found in the answer.
        reasoning_pattern: a regular expression, searched in a process of its own, which is killed where it takes too
            long (`grpo_rl.envs.grading.patterns`).
        answer_pattern: likewise.
        system_prompt: the first message; None or an empty text leaves it out.
        examples: ``question`` and ``answer`` of solved problems, shown as earlier turns.

    Raises:
        ValueError: a weight is not a finite number, a pattern is no regular expression, an example lacks a column, or a
            row's answer has no number.
    """

    reward_parts = ("correctness", "reasoning_format", "answer_format")

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        correctness: float = 2.0,
        reasoning_format: float = 0.5,
        answer_format: float = 0.5,
        reasoning_pattern: str = REASONING_PATTERN,
        answer_pattern: str = ANSWER_PATTERN,
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self._weights = {
            "correctness": correctness, "reasoning_format": reasoning_format, "answer_format": answer_format,
        }  # fmt: skip
        check_weights(self._weights)
        for name, pattern in (("reasoning_pattern", reasoning_pattern), ("answer_pattern", answer_pattern)):
            _check_pattern(name, pattern)
        self._patterns, self._budget_s = (reasoning_pattern, answer_pattern), math.inf
        self._before: Messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        for index, example in enumerate(examples or ()):
            check_columns(example, f"env.examples[{index}]")
            self._before += [
                {"role": "user", "content": example["question"]},
                {"role": "assistant", "content": example["answer"]},
            ]
        self.rows = rows
        for index, row in enumerate(rows):
            if extract_answer(row["answer"]) is None:
                raise ValueError(f"the answer of row {index} has no number: {row['answer'][-80:]!r}; end it on #### N")

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the question."""
        return [*self._before, {"role": "user", "content": row["question"]}]

    def ready(self, deadline_s: float) -> None:
        """Notes how long the responses of a group may take together."""
        self._budget_s = deadline_s

    @property
    def together(self) -> bool:
        """Whether :meth:`score_many` is asked: not where a subclass scores in its own way."""
        return type(self).score is GSM8K.score

    def score(self, row: dict, response: str) -> Reward:
        """Whether the final number is right, and the two formats.

        Raises:
            TimeoutError: the search for a pattern took too long.

        >>> task = GSM8K([])
        >>> task.score({"question": "3 + 4?", "answer": "#### 7"}, "<answer>7.00</answer>").parts
        {'correctness': 2.0, 'reasoning_format': 0.0, 'answer_format': 0.5}
        """
        [result] = self._scored([row], [response])
        if isinstance(result, Exception):
            raise result
        return result

    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> list[Reward | Exception]:
        """As :meth:`score`, with the patterns of all responses searched together; or as a subclass's own score."""
        if not self.together:
            return list(super().score_many(rows, responses))
        return self._scored(rows, responses)

    def _scored(self, rows: Sequence[dict], responses: Sequence[str]) -> list[Reward | Exception]:
        formats = patterns.found(self._patterns, responses, (REASONING_PATTERN, ANSWER_PATTERN), self._budget_s)
        return [self._reward(*judged) for judged in zip(rows, responses, formats, strict=True)]

    def _reward(self, row: dict, response: str, formats: list[bool] | Exception) -> Reward | Exception:
        if isinstance(formats, Exception):
            return formats
        gold = _gold(row["answer"])
        if gold is None:
            # Otherwise an answer without a number would equal it.
            return ValueError(f"the row's answer has no number: {row['answer'][-80:]!r}; end it on #### N")
        earned = (extract_answer(response) == gold, *formats)
        return Reward(
            {
                name: float(self._weights[name]) if paid else 0.0
                for name, paid in zip(self.reward_parts, earned, strict=True)
            }
        )

    def gold(self, row: dict) -> str | None:
        """The gold number."""
        number = extract_answer(row["answer"])
        return None if number is None else f"{number:f}"


class GSM8KEnv(LLMEnv):
    """GSM8K as a TorchRL environment.

    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did
    Natalia sell altogether in April and May?" An answer that thinks and answers in form, and is right, earns 3:

    >>> row = {"question": "Natalia sold clips to 48 of her friends in April, [...]", "answer": "[...] #### 72"}
    >>> answer = "<reasoning>In May 48 / 2 = 24, so 48 + 24 = 72.</reasoning><answer>72</answer>"
    >>> reward = GSM8K([row]).score(row, answer)
    >>> reward.total, reward.parts
    (3.0, {'correctness': 2.0, 'reasoning_format': 0.5, 'answer_format': 0.5})

    Args:
        num_envs: prompts in flight.
        repeats: answers to each, the group size G.
        tokenizer: of the model that answers.
        path: see :func:`load_rows`.
        split: see :func:`load_rows`.
        system_prompt: see :class:`GSM8K`.
        examples: see :class:`GSM8K`.
        reward: weights and patterns of :class:`GSM8K`, as in the config's ``env.reward``.
        settings: of :class:`LLMEnv`: ``max_prompt_tokens``, ``long_prompt``, ``seed`` and others.
    """

    def __init__(
        self,
        num_envs: int,
        repeats: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str | Path | None = None,
        split: str = "train",
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, str]] = (),
        reward: Mapping | None = None,
        **settings: Any,
    ) -> None:
        task = GSM8K(load_rows(path, split), system_prompt=system_prompt, examples=examples, **(reward or {}))
        super().__init__(task, tokenizer, num_envs, repeats, **settings)


def load_rows(path: str | Path | None = None, split: str = "train") -> list[dict]:
    """Problems with ``question`` and ``answer``.

    Args:
        path: a JSONL file, or a name of :data:`SHIPPED`; None takes ``openai/gsm8k`` from the hub (or its cache).
        split: of the hub's data, ``train`` or ``test``; a file is one split.

    Raises:
        ValueError: there is no such file or split, the hub can't be reached, or a row lacks a column.

    >>> load_rows("quickstart-test")[0]["answer"].splitlines()[-1]
    '#### ...'
    """
    if path is None:
        return _checked(_hub_rows(split), f"{HUB_NAME} {split}")
    file = SHIPPED.get(str(path)) or Path(path).expanduser()
    try:
        with file.open(encoding="utf-8-sig") as lines:
            return _checked(_json_rows(lines, file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"env.path={path} can't be read: {error}; give a JSONL file with {' and '.join(COLUMNS)}, "
            f"or one of {', '.join(SHIPPED)}"
        ) from error


def check_columns(row: object, where: str) -> None:
    """Raises ValueError unless ``row`` has its columns, as texts."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is no object with {' and '.join(COLUMNS)}, but {str(row)[:80]!r}")
    for column in COLUMNS:
        if column not in row:
            raise ValueError(f"{where} has no {column}; its columns are {list(row)}; rename or add the column")
        if not isinstance(row[column], str):
            raise ValueError(f"{where}: {column} is {row[column]!r}; it must be a text")


def _checked(rows: Iterable[tuple[str, dict]], source: str) -> list[dict]:
    checked = []
    for where, row in rows:
        check_columns(row, where)
        checked.append(dict(row))
    if not checked:
        raise ValueError(f"{source} has no rows")
    return checked


def _json_rows(lines: Iterable[str], file: Path) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            yield where, json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON ({error}); each line is one object") from error


def _hub_rows(split: str) -> Iterator[tuple[str, dict]]:
    # Imported here: it takes a second, which a local file need not pay.
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from httpx2 import HTTPError  # what huggingface_hub raises

    if split not in HUB_SPLITS:
        raise ValueError(f"{HUB_NAME} has no split {split!r}; it has {' and '.join(HUB_SPLITS)}")
    try:
        data = load_dataset(HUB_NAME, "main", split=split)
    except (ConnectionError, DatasetNotFoundError, HTTPError) as error:
        raise ValueError(
            f"{HUB_NAME} can't be had from the hub ({error}); with a copy of it, set env.path=FILE.jsonl "
            "(and env.eval_path for the held-out rows)"
        ) from error
    for index, row in enumerate(data):
        yield f"{HUB_NAME} {split}, row {index}", dict(row)


# The responses to one question come together, and each needs the gold.
_gold = lru_cache(maxsize=64)(extract_answer)


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"env.reward.{name}={pattern!r} is no regular expression: {error}") from error
