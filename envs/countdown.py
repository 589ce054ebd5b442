"""Countdown: a target is to be reached from given numbers with + - * /; generated, endless, and judged exactly."""

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from random import Random
from typing import Annotated, Any

from typing_extensions import override

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, means, weight
from grpo_rl.envs.grading.tags import last_answer
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import Messages, Reward, Task, opening
from grpo_rl.envs.tools.arithmetic import COMPUTE, Unreadable, value_of

SPLITS = ("train", "test")
HELD_OUT_SHARE = 10  # One in so many sets of numbers is held out.
MAX_TRIES = 100_000

_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2}
_COMPOUND_ON_THE_RIGHT = {"+": 1, "-": 2, "*": 2, "/": 3}  # the weakest operand that needs no brackets there

MAX_CHARS, MAX_DEPTH = 256, 32
"""The limits of an expression: one of ten numbers of three digits takes about 80 characters, and brackets nine deep."""

_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*/()]")

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


class Countdown(Task):
    """Puzzles of numbers and a target; a response earns ``correctness`` and ``answer_format``.

    "Using the numbers 44, 19, 35, write an expression that equals 98." A response with one that does earns 1.1:

    >>> row = {"numbers": [44, 19, 35], "target": 98}
    >>> reward = Countdown([row]).score(row, "<think>63 + 35</think><answer>44 + 19 + 35</answer>")
    >>> reward.total, reward.parts
    (1.1, {'correctness': 1.0, 'answer_format': 0.1})

    What is judged is the inside of the last ``<answer>…</answer>``, as in https://github.com/Jiayi-Pan/TinyZero.

    Rows have ``numbers`` and ``target``, and ``solution`` for logs where there is one.

    Raises:
        ValueError: an example lacks a column.
    """

    reward_parts = ("correctness", "answer_format")
    correct_part = "correctness"

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        correctness: Annotated[float, weight("the expression reaches the target by the rules")] = 1.0,
        answer_format: Annotated[float, weight("there is an expression that has a value")] = 0.1,
        use_all: Annotated[
            bool, means("true: each number has to be used once; false: at most once", of_reward=True)
        ] = False,
        system_prompt: SystemPrompt = SYSTEM_PROMPT,
        examples: Annotated[
            Sequence[Mapping[str, Any]],
            means(
                "turns before the puzzle: {numbers, target, response}; a small model that sees none writes no "
                "expression"
            ),
        ] = EXAMPLES,
    ) -> None:
        self._weights = {"correctness": correctness, "answer_format": answer_format}
        self._use_all = use_all
        shown = []
        for index, example in enumerate(examples or ()):
            where = f"env.examples[{index}]"
            row = tables.checked_row(_checked(dict(example), where), {"response": str}, where)
            shown.append((self._question(row), row["response"]))
        self._before = opening(system_prompt, shown)
        self.rows = rows

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the puzzle with its rule."""
        return [*self._before, {"role": "user", "content": self._question(row)}]

    def _question(self, row: dict) -> str:
        numbers = ", ".join(map(str, row["numbers"]))
        often = "exactly" if self._use_all else "at most"
        return (
            f"Using the numbers {numbers}, write an expression that equals {row['target']}. You may use +, -, *, / and "
            f"brackets, and each number {often} once."
        )

    @override
    def score(self, row: dict, response: str) -> Reward:
        expression = last_answer(response) or ""
        right = check(row["numbers"], row["target"], expression, use_all=self._use_all)
        return Reward(self._paid({"correctness": right, "answer_format": evaluated(expression) is not None}))

    def final_answers(self, responses: Sequence[str]) -> list[str | None]:
        """The expression of each response, without spaces; the same sum in another order is another answer.

        >>> Countdown([]).final_answers(["<answer>50 - 3</answer>", "<answer>50-3</answer>", "50 - 3"])
        ['50-3', '50-3', None]
        """
        found = map(last_answer, responses)
        return [None if answer is None else "".join(answer.split()) or None for answer in found]

    def gold(self, row: dict) -> str | None:
        """One solution; there may be others."""
        return row.get("solution")


class Puzzles(Sequence[dict]):
    """``count`` puzzles with a solution, each made when it is asked for: row i depends on the settings and i alone.

    Which sets of numbers are held out is fixed for good, by a checksum of the numbers: no training puzzle has the
    numbers of a held-out one, whatever seeds and counts. Rows of one split may repeat.

    >>> Puzzles(1000)[7] == Puzzles(2000)[7], sorted(Puzzles(1000)[7])
    (True, ['numbers', 'solution', 'target'])
    """

    def __init__(
        self,
        count: int,
        split: str = "train",
        *,
        sizes: Annotated[Sequence[int], means("how many numbers a puzzle has")] = (3, 4),
        max_number: Annotated[int, means("the largest number of a puzzle", ge=1)] = 99,
        max_target: Annotated[int, means("the largest target", ge=1)] = 100,
        seed: Annotated[int, means("seed of the generator")] = 0,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"countdown has no split {split!r}; it has {' and '.join(SPLITS)}")
        self._count, self._split, self._sizes = count, split, tuple(sizes)
        self._max_number, self._max_target, self._seed = max_number, max_target, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        return self._puzzle(Random(f"{self._seed}/{self._split}/{range(self._count)[index]}"))

    def _puzzle(self, rng: Random) -> dict:
        for _ in range(MAX_TRIES):
            numbers = [rng.randint(1, self._max_number) for _ in range(rng.choice(self._sizes))]
            if is_held_out(numbers) == (self._split == "test"):
                target, solution = _combined(numbers, rng)
                if 1 <= target <= self._max_target:
                    return {"numbers": numbers, "target": target, "solution": solution}
        raise ValueError(f"no puzzle found in {MAX_TRIES} tries; lower max_number or raise max_target")


def is_held_out(numbers: Sequence[int]) -> bool:
    """True if puzzles with these numbers, in any order, are for testing only."""
    return zlib.crc32(repr(sorted(numbers)).encode()) % HELD_OUT_SHARE == 0


def _combined(numbers: Sequence[int], rng: Random) -> tuple[int, str]:
    """All numbers combined in a random way: the value, and the expression.

    Steps are those of pencil and paper, without fractions and negative numbers.
    """
    operands = [(number, str(number), 3) for number in numbers]
    while len(operands) > 1:
        left, right = (operands.pop(rng.randrange(len(operands))) for _ in range(2))
        if left[0] < right[0]:
            left, right = right, left
        divides = right[0] and left[0] % right[0] == 0
        sign = rng.choice("+-*/" if divides else "+-*")
        before = left[1] if left[2] >= _LEVEL[sign] else f"({left[1]})"
        after = right[1] if right[2] >= _COMPOUND_ON_THE_RIGHT[sign] else f"({right[1]})"
        operands.append((COMPUTE[sign](left[0], right[0]), f"{before} {sign} {after}", _LEVEL[sign]))
    value, expression, _ = operands[0]
    return value, expression


def load_rows(
    path: AnySource = None, split: str = "train", puzzles: Annotated[Mapping | None, Puzzles] = None
) -> Sequence[dict]:
    """Rows with ``numbers`` (or ``nums``, as ``Jiayi-Pan/Countdown-Tasks-3to4`` has) and ``target``.

    Without a path 10,000 puzzles are generated to train on, or 500 held-out ones, with the settings ``puzzles`` of
    :class:`~grpo_rl.envs.countdown.Puzzles`.

    >>> row = load_rows(split="test")[0]
    >>> check(row["numbers"], row["target"], row["solution"], use_all=True)
    True
    """
    source = Source.of(path)
    if source.path is None:
        return Puzzles(**{"count": 10_000 if split == "train" else 500, "split": split, **(puzzles or {})})
    return [row.now(_checked(row, row.where)) for row in tables.load_rows(source, split)]


def _checked(row: dict, where: str) -> dict:
    row = {"numbers" if column == "nums" else column: value for column, value in row.items()}
    numbers, target = row.get("numbers"), row.get("target")
    given = isinstance(numbers, Sequence) and all(type(number) is int and number >= 0 for number in numbers)
    if not given or not numbers:
        raise ValueError(f"{where}: numbers is {numbers!r}; it must be a list of whole numbers, none negative")
    if isinstance(target, bool) or not isinstance(target, int):
        raise ValueError(f"{where}: target is {target!r}; it must be a whole number")
    return row


CountdownEnv = TaskSpec(Countdown, load_rows, row_settings=("puzzles",))
"""Countdown as a TorchRL environment."""


def check(numbers: Sequence[int], target: int, expression: str, use_all: bool = False) -> bool:
    """True if ``expression`` equals ``target`` and uses each of ``numbers`` at most once, or exactly once.

    An expression is made of whole numbers, ``+ - * /``, signs and round brackets, and computed in exact fractions:
    nothing else is read, and nothing evaluated as code. One that is longer than :data:`MAX_CHARS` characters, nested
    deeper than :data:`MAX_DEPTH`, or divides by zero, is wrong.

    >>> check([3, 3, 8, 8], 24, "8 / (3 - 8/3)"), check([3, 8], 24, "3 * 8 * 1"), check([3, 8], 24, "3 * 8 = 24")
    (True, False, False)
    >>> check([2, 5, 7], 10, "2 * 5"), check([2, 5, 7], 10, "2 * 5", use_all=True)
    (True, False)
    """
    found = evaluated(expression)
    if found is None:
        return False
    value, used = found
    allowed = used == Counter(numbers) if use_all else used <= Counter(numbers)
    return allowed and value == target


def evaluated(expression: str) -> tuple[Fraction, Counter[int]] | None:
    """The value of an expression, and the numbers in it; None if it is no expression, or divides by zero."""
    text = expression.strip()
    tokens = _TOKEN.findall(text) if len(text) <= MAX_CHARS else []
    if "".join(tokens) != "".join(text.split()):
        return None
    depths = accumulate({"(": 1, ")": -1}.get(token, 0) for token in tokens)
    if max(depths, default=0) > MAX_DEPTH:
        return None
    try:
        # Apart, as `**` and `//` are no operators here.
        value = value_of(" ".join(tokens))
    except (Unreadable, ZeroDivisionError, OverflowError):
        return None
    return value, Counter(int(token) for token in tokens if token.isdigit())
