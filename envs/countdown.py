"""Countdown: a target is to be reached from given numbers with + - * /; generated, endless, and judged exactly."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from typing_extensions import override

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, means, weight
from grpo_rl.envs.generated.puzzles import Puzzles
from grpo_rl.envs.grading.expressions import check, evaluated
from grpo_rl.envs.grading.tags import last_answer
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import Messages, Reward, Task, opening

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


def load_rows(
    path: AnySource = None, split: str = "train", puzzles: Annotated[Mapping | None, Puzzles] = None
) -> Sequence[dict]:
    """Rows with ``numbers`` (or ``nums``, as ``Jiayi-Pan/Countdown-Tasks-3to4`` has) and ``target``.

    Without a path 10,000 puzzles are generated to train on, or 500 held-out ones, with the settings ``puzzles`` of
    :class:`~grpo_rl.envs.generated.puzzles.Puzzles`.

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
