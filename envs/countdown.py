"""Countdown: reach a target number from given numbers with + - * /; generated, endless, and judged exactly."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_rl.envs import tables
from grpo_rl.envs.base import LLMEnv, Messages, Reward, Task
from grpo_rl.envs.grading.tags import last_answer
from grpo_rl.envs.task import check_weights

__all__ = ["Countdown", "CountdownEnv", "Puzzles", "check", "load_rows"]

SYSTEM_PROMPT = (
    "Think inside <think> and </think>, then give the expression alone inside <answer> and </answer>, for example "
    "<answer>(1 + 2) * 3</answer>."
)
# A small model that is shown no solved puzzle writes no expression at all.
EXAMPLES = (
    {
        "numbers": [3, 6, 20],
        "target": 38,
        "response": "<think>6 * 3 = 18, and 20 + 18 = 38.</think><answer>20 + 6 * 3</answer>",
    },
    {
        "numbers": [50, 9, 8],
        "target": 33,
        "response": "<think>50 - 9 = 41, and 41 - 8 = 33.</think><answer>50 - 9 - 8</answer>",
    },
)
SPLITS = ("train", "test")
HELD_OUT_SHARE = 10  # One in so many sets of numbers is held out.
MAX_CHARS, MAX_DEPTH = 256, 32
"""Of an expression: with ten numbers of three digits one takes about 80 characters, and brackets nine deep."""

_TOKEN = re.compile(r"\s*(?:(0|[1-9][0-9]*)|([-+*/()]))")
_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}
_COMPOUND_ON_THE_RIGHT = {"+": 1, "-": 2, "*": 2, "/": 3}  # the weakest operand that needs no brackets there


class Countdown(Task):
    """Puzzles of numbers and a target; an answer earns ``correctness`` and ``answer_format``.

    What is judged is the inside of the last ``<answer>…</answer>``, as in https://github.com/Jiayi-Pan/TinyZero.

    Args:
        rows: ``numbers`` and ``target``, and ``solution`` for logs where there is one.
        correctness: paid where the expression reaches the target by the rules (see :func:`check`).
        answer_format: paid where there is an answer and it has a value, whatever that is and whatever its numbers.
        use_all: whether each number must be used exactly once, instead of at most once.
        system_prompt: the first message; None or an empty text leaves it out.
        examples: ``numbers``, ``target`` and ``response`` of solved puzzles, shown as earlier turns.

    Raises:
        ValueError: a weight is not a finite number, an example lacks a column, or its response is wrong.
    """

    reward_parts = ("correctness", "answer_format")

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        correctness: float = 1.0,
        answer_format: float = 0.1,
        use_all: bool = False,
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, Any]] = EXAMPLES,
    ) -> None:
        self._weights = {"correctness": correctness, "answer_format": answer_format}
        check_weights(self._weights)
        self._use_all = use_all
        self._before: Messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        for index, example in enumerate(examples or ()):
            row, where = _checked(dict(example), f"env.examples[{index}]"), f"env.examples[{index}]"
            if not isinstance(row.get("response"), str):
                raise ValueError(f"{where} has no text response; its columns are {list(row)}")
            if not self._is_right(row, _answer(row["response"])):
                raise ValueError(
                    f"{where} is wrong: {_answer(row['response'])!r} is no way to {row['target']} with each of "
                    f"{list(row['numbers'])} {self._often} once; write one inside <answer>…</answer>"
                )
            self._before += [
                {"role": "user", "content": self._question(row)},
                {"role": "assistant", "content": row["response"]},
            ]
        self.rows = rows

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the puzzle with its rule."""
        return [*self._before, {"role": "user", "content": self._question(row)}]

    def _question(self, row: dict) -> str:
        numbers = ", ".join(map(str, row["numbers"]))
        return (
            f"Using the numbers {numbers}, write an expression that equals {row['target']}. You may use +, -, *, / and "
            f"brackets, and each number {self._often} once."
        )

    @property
    def _often(self) -> str:
        return "exactly" if self._use_all else "at most"

    def _is_right(self, row: dict, expression: str) -> bool:
        return check(row["numbers"], row["target"], expression, use_all=self._use_all)

    def score(self, row: dict, response: str) -> Reward:
        """Whether the expression is right, and whether it is one.

        >>> row = {"numbers": [3, 7, 50], "target": 47}
        >>> Countdown([row]).score(row, "<think>50 is near.</think><answer>50 - 3</answer>").parts
        {'correctness': 1.0, 'answer_format': 0.1}
        """
        expression = _answer(response)
        earned = {
            "correctness": self._is_right(row, expression),
            "answer_format": _evaluated(expression) is not None,
        }
        return Reward({name: float(self._weights[name]) if earned[name] else 0.0 for name in self.reward_parts})

    def gold(self, row: dict) -> str | None:
        """One solution; there may be others."""
        return row.get("solution")


class CountdownEnv(LLMEnv):
    """Countdown as a TorchRL environment.

    "Using the numbers 44, 19, 35, write an expression that equals 98." An answer that is one and right earns 1.1:

    >>> row = {"numbers": [44, 19, 35], "target": 98}
    >>> reward = Countdown([row]).score(row, "<think>63 + 35</think><answer>44 + 19 + 35</answer>")
    >>> reward.total, reward.parts
    (1.1, {'correctness': 1.0, 'answer_format': 0.1})

    Args:
        num_envs: prompts in flight.
        repeats: answers to each, the group size G.
        tokenizer: of the model that answers.
        path: see :func:`load_rows`.
        split: see :func:`load_rows`.
        puzzles: settings of the generated :class:`Puzzles`.
        system_prompt: see :class:`Countdown`.
        examples: see :class:`Countdown`.
        reward: weights and rule of :class:`Countdown`, as in the config's ``env.reward``.
        settings: see :class:`LLMEnv`.
    """

    def __init__(
        self,
        num_envs: int,
        repeats: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str | Path | None = None,
        split: str = "train",
        puzzles: Mapping[str, Any] | None = None,
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, Any]] = EXAMPLES,
        reward: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        rows = load_rows(path, split, **(puzzles or {}))
        task = Countdown(rows, system_prompt=system_prompt, examples=examples, **(reward or {}))
        super().__init__(task, tokenizer, num_envs, repeats, **settings)


def check(numbers: Sequence[int], target: int, expression: str, use_all: bool = False) -> bool:
    """Whether ``expression`` equals ``target`` and uses each of ``numbers`` at most once, or exactly once.

    An expression is made of whole numbers, ``+ - * /``, signs and round brackets, and computed in exact fractions:
    nothing else is read, and nothing evaluated as code. One that is longer than :data:`MAX_CHARS` characters, nested
    deeper than :data:`MAX_DEPTH`, or divides by zero, is wrong.

    >>> check([3, 3, 8, 8], 24, "8 / (3 - 8/3)"), check([3, 8], 24, "3 * 8 * 1"), check([3, 8], 24, "3 * 8 = 24")
    (True, False, False)
    >>> check([2, 5, 7], 10, "2 * 5"), check([2, 5, 7], 10, "2 * 5", use_all=True)
    (True, False)
    """
    evaluated = _evaluated(expression)
    if evaluated is None:
        return False
    value, used = evaluated
    allowed = used == Counter(numbers) if use_all else used <= Counter(numbers)
    return allowed and value == target


def _answer(response: str) -> str:
    return last_answer(response) or ""


def _evaluated(expression: str) -> tuple[Fraction, Counter[int]] | None:
    """The value of an expression, and the numbers in it; None if it is no expression, or divides by zero."""
    tokens = _tokens(expression)
    if tokens is None:
        return None
    parser = _Parser(tokens)
    try:
        value = parser.sum(0)
    except (SyntaxError, ZeroDivisionError):
        return None
    if parser.at < len(tokens):
        return None
    return value, Counter(token for token in tokens if isinstance(token, int))


def _tokens(expression: str) -> list[int | str] | None:
    text = expression.strip()
    if len(text) > MAX_CHARS:
        return None
    tokens: list[int | str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(int(match[1]) if match[1] else match[2])
        at = match.end()
    return tokens


class _Parser:
    """Recursive descent: a sum is products between + and -, a product is factors between * and /.

    Raises:
        SyntaxError: the tokens are no expression.
        ZeroDivisionError: they divide by zero.
    """

    def __init__(self, tokens: Sequence[int | str]) -> None:
        self.tokens, self.at = tokens, 0

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while (sign := self._take("+-")) is not None:
            operand = self.product(depth)
            value = value + operand if sign == "+" else value - operand
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while (sign := self._take("*/")) is not None:
            operand = self.factor(depth)
            value = value * operand if sign == "*" else value / operand
        return value

    def factor(self, depth: int) -> Fraction:
        negative = False
        while (sign := self._take("+-")) is not None:
            negative ^= sign == "-"
        value = self.bracket(depth) if self._take("(") else self.number()
        return -value if negative else value

    def bracket(self, depth: int) -> Fraction:
        if depth == MAX_DEPTH:
            raise SyntaxError("nested too deep")
        value = self.sum(depth + 1)
        if not self._take(")"):
            raise SyntaxError("an open bracket")
        return value

    def number(self) -> Fraction:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if not isinstance(token, int):
            raise SyntaxError("no number where one is needed")
        self.at += 1
        return Fraction(token)

    def _take(self, signs: str) -> str | None:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if not isinstance(token, str) or token not in signs:
            return None
        self.at += 1
        return token


# ---- the data ----


MAX_TRIES = 100_000


class Puzzles(Sequence[dict]):
    """``count`` puzzles with a solution, each made when it is asked for: row i depends on the settings and i alone.

    Which sets of numbers are held out is fixed for good, by a checksum of the numbers: no training puzzle has the
    numbers of a held-out one, whatever seeds and counts. Rows of one split may repeat.

    Args:
        count: length.
        split: ``train`` or ``test``.
        sizes: how many numbers a puzzle has; one of these at random.
        max_number: numbers are 1 to this.
        max_target: targets are 1 to this.
        seed: of all rows.

    Raises:
        ValueError: a setting makes no sense.

    >>> Puzzles(1000)[7] == Puzzles(2000)[7], sorted(Puzzles(1000)[7])
    (True, ['numbers', 'solution', 'target'])
    """

    def __init__(
        self,
        count: int,
        split: str = "train",
        *,
        sizes: Sequence[int] = (3, 4),
        max_number: int = 99,
        max_target: int = 100,
        seed: int = 0,
    ) -> None:
        if count < 1:
            raise ValueError(f"count={count}; there must be at least 1 puzzle")
        if split not in SPLITS:
            raise ValueError(f"countdown has no split {split!r}; it has {' and '.join(SPLITS)}")
        if not sizes or not all(2 <= size <= 10 for size in sizes):
            raise ValueError(f"sizes={list(sizes)}; a puzzle has 2 to 10 numbers")
        if max_number < 10 or max_target < 10:
            raise ValueError(f"max_number={max_number}, max_target={max_target}; below 10 there are too few puzzles")
        self._count, self._split, self._sizes = count, split, tuple(sizes)
        self._max_number, self._max_target, self._seed = max_number, max_target, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"puzzle {index} of {self._count}")
        return self._puzzle(Random(f"{self._seed}/{self._split}/{index % self._count}"))

    def _puzzle(self, rng: Random) -> dict:
        for _ in range(MAX_TRIES):
            numbers = [rng.randint(1, self._max_number) for _ in range(rng.choice(self._sizes))]
            if is_held_out(numbers) == (self._split == "test"):
                target, solution = _combined(numbers, rng)
                if target.denominator == 1 and 1 <= target <= self._max_target:
                    return {"numbers": numbers, "target": int(target), "solution": solution}
        raise ValueError(
            f"no puzzle found in {MAX_TRIES} tries: of {list(self._sizes)} numbers up to {self._max_number}, hardly "
            f"any reach a target up to {self._max_target}; lower max_number or raise max_target"
        )


def is_held_out(numbers: Sequence[int]) -> bool:
    """Whether puzzles with these numbers, in any order, are for testing only."""
    return zlib.crc32(repr(sorted(numbers)).encode()) % HELD_OUT_SHARE == 0


def _combined(numbers: Sequence[int], rng: Random) -> tuple[Fraction, str]:
    """All numbers put together in a random way: the value, and the expression.

    Steps are those of pencil and paper, without fractions and negative numbers.
    """
    operands = [(Fraction(number), str(number), 3) for number in numbers]
    while len(operands) > 1:
        left, right = (operands.pop(rng.randrange(len(operands))) for _ in range(2))
        if left[0] < right[0]:
            left, right = right, left
        divides = right[0] and left[0] % right[0] == 0
        sign = rng.choice("+-*/" if divides else "+-*")
        operands.append((_COMPUTE[sign](left[0], right[0]), _written(left, sign, right), _LEVEL[sign]))
    value, expression, _ = operands[0]
    return value, expression


_COMPUTE = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}


def _written(left: tuple[Fraction, str, int], sign: str, right: tuple[Fraction, str, int]) -> str:
    before = left[1] if left[2] >= _LEVEL[sign] else f"({left[1]})"
    after = right[1] if right[2] >= _COMPOUND_ON_THE_RIGHT[sign] else f"({right[1]})"
    return f"{before} {sign} {after}"


def load_rows(path: str | Path | None = None, split: str = "train", **puzzles: Any) -> Sequence[dict]:
    """Rows with ``numbers`` and ``target``.

    Args:
        path: a file or a hub name with columns ``numbers`` (or ``nums``, as ``Jiayi-Pan/Countdown-Tasks-3to4`` has) and
            ``target``, see :func:`grpo_rl.envs.tables.load_rows`; None generates 10,000 puzzles to train on, or 500
            held-out ones.
        split: ``train`` or ``test``; a file is one split.
        puzzles: settings of :class:`Puzzles`, for those that are generated; a file has its own.

    Raises:
        ValueError: a setting makes no sense, there is no such file, or a row lacks a column.

    >>> row = load_rows(split="test")[0]
    >>> check(row["numbers"], row["target"], row["solution"], use_all=True)
    True
    """
    if path is None:
        return Puzzles(**{"count": 10_000 if split == "train" else 500, "split": split, **puzzles})
    return [_checked(row, f"{path}, row {index}") for index, row in enumerate(tables.load_rows(path, split))]


def _checked(row: dict, where: str) -> dict:
    row = {"numbers" if column == "nums" else column: value for column, value in row.items()}
    numbers, target = row.get("numbers"), row.get("target")
    if not isinstance(numbers, Sequence) or not numbers or not all(map(_is_given, numbers)):
        raise ValueError(f"{where}: numbers is {numbers!r}; it must be a list of whole numbers, none negative")
    if isinstance(target, bool) or not isinstance(target, int):
        raise ValueError(f"{where}: target is {target!r}; it must be a whole number")
    return row


def _is_given(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
