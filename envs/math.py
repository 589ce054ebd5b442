"""MATH: competition problems, judged on the boxed answer by math-verify, in processes that can be killed."""

import time
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Annotated, Any

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, means, weight
from grpo_rl.envs.grading.boxed import is_unbounded
from grpo_rl.envs.grading.tags import last_boxed
from grpo_rl.envs.grading.verification import DEADLINE_S, MAX_CHARS, Verdict, unboxed, verdicts
from grpo_rl.envs.sources import AnySource, Row, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import GroupTask, Messages, Reward, Unjudgeable, asking, opening

HUB_SETS = {"train": ("DigitalLearningGmbH/MATH-lighteval", "train"), "test": ("HuggingFaceH4/MATH-500", "test")}
"""The hub's data set and its split, for each of ours; the 500 test problems are none of the training ones."""

COLUMNS = ("problem", "answer", "solution")
"""The columns that are read of the data; some sets have whole conversations next to them."""

FORMS_DEADLINES = 10
"""The longest search for a row's equal answers, in deadlines of one comparison."""

SYSTEM_PROMPT = r"Reason step by step, and put the final answer within \boxed{}."


class Math(GroupTask):
    r"""Problems with a boxed answer; a response earns ``correctness`` and ``answer_format``.

    "Compute $\sin 45^\circ$." A response whose boxed answer is right, however written, earns 1.1:

    >>> row = {"problem": r"Compute $\sin 45^\circ$.", "answer": r"\frac{\sqrt{2}}{2}"}
    >>> reward = Math([row]).score(row, r"The legs of [...], so it is $\boxed{1/\sqrt{2}}$.")
    >>> reward.total, reward.parts
    (1.1, {'correctness': 1.0, 'answer_format': 0.1})

    Rows have ``problem``, a text or chat messages, and ``answer`` or ``solution``: the gold answer is ``answer``, else
    what the solution's last ``\boxed{}`` holds.

    Raises:
        ValueError: an example lacks a column, or not one row has a gold answer.
    """

    reward_parts = ("correctness", "answer_format")
    correct_part = "correctness"

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        correctness: Annotated[float, weight("the boxed answer equals the gold answer")] = 1.0,
        answer_format: Annotated[float, weight("there is a closed box")] = 0.1,
        deadline_s: Annotated[
            float,
            means(
                "seconds for one comparison; a response that takes longer is wrong, and logged as measure/timed_out",
                of_reward=True,
                gt=0,
            ),
        ] = DEADLINE_S,
        system_prompt: SystemPrompt = SYSTEM_PROMPT,
        examples: Annotated[
            Sequence[Mapping[str, Any]], means("few-shot turns before the problem: a list of {problem, solution}")
        ] = (),
    ) -> None:
        self._weights = {"correctness": correctness, "answer_format": answer_format}
        self._deadline_s = deadline_s
        columns = {"problem": str, "solution": str}
        shown = [tables.checked_row(one, columns, f"env.examples[{i}]") for i, one in enumerate(examples or ())]
        self._before = opening(system_prompt, [(example["problem"], example["solution"]) for example in shown])
        self.rows = rows
        if len(rows) and all(self.gold(row) is None for row in rows):
            raise ValueError(rf"none of the {len(rows)} rows has a gold answer; give answer, or a \boxed{{}} solution")

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the problem."""
        return asking(self._before, row["problem"])

    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> list[Reward | Exception]:
        """The rewards of a group; the workers make all comparisons at once.

        A response whose comparison does not end in time, nor when nothing else is under way, is wrong, and has the
        measure ``timed_out``. One whose process was killed, as by a machine short of memory, has no reward.
        """
        golds = [self.gold(row) or "" for row in rows]
        judged = verdicts(golds, responses, self._deadline_s, self._budget_s)
        return [self._reward(*pair) for pair in zip(golds, responses, judged, strict=True)]

    def gold(self, row: dict) -> str | None:
        """The gold answer, without its box."""
        return unboxed(row["answer"]) if row.get("answer") else last_boxed(row.get("solution", ""))

    def final_answers(self, responses: Sequence[str]) -> list[str | None]:
        r"""The content of each response's last box; of those equal as mathematics, the form that comes first.

        What is left as work to do, or not compared within :data:`FORMS_DEADLINES`, is equal to nothing else.

        >>> Math([]).final_answers([r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", r"\boxed{2}", "No idea."])
        ['0.5', '0.5', '2', None]
        """
        answers = [last_boxed(response, MAX_CHARS) for response in responses]
        forms = {answer: answer for answer in answers if answer is not None}
        # Here the policy's text stands for the gold answer, which may be work that sympy never finishes.
        left = [answer for answer in forms if not is_unbounded(answer)]
        until = time.monotonic() + FORMS_DEADLINES * self._deadline_s
        while len(left) > 1 and (budget_s := until - time.monotonic()) > 0:
            first, *others = left
            boxes = [rf"\boxed{{{other}}}" for other in others]
            judged = verdicts([first] * len(others), boxes, self._deadline_s, budget_s)
            same = [isinstance(verdict, Verdict) and bool(verdict.equal) for verdict in judged]
            forms |= dict.fromkeys(compress(others, same), first)
            left = [other for other, equal in zip(others, same, strict=True) if not equal]
        return [None if answer is None else forms[answer] for answer in answers]

    def demonstration(self, row: dict) -> str | None:
        """The row's ``solution``; None where there is only an answer."""
        return row.get("solution")

    def _reward(self, gold: str, response: str, verdict: Verdict | Exception) -> Reward | Exception:
        if isinstance(verdict, Exception):
            return verdict
        if verdict.equal is None:
            return Unjudgeable(f"the gold answer {gold[:200]!r} can't be parsed")
        earned = {"correctness": verdict.equal, "answer_format": last_boxed(response) is not None}
        return Reward(self._paid(earned), {"timed_out": float(verdict.timed_out)})


def load_rows(path: AnySource = None, split: str = "train") -> Sequence[dict]:
    """Problems of :func:`grpo_rl.envs.tables.load_rows`, or of the hub's :data:`HUB_SETS`."""
    source = Source.of(path)
    hub, hub_split = HUB_SETS.get(split, (None, split))
    rows = tables.load_rows(source, split if source.path else hub_split, COLUMNS, chat=("problem", "solution"), hub=hub)
    return [_checked(row) for row in rows]


def _checked(row: Row) -> dict:
    answer = row.pop("answer", None)
    if answer not in (None, ""):
        row["answer"] = answer
    # The error on a row that has neither names "answer or solution".
    given = next((column for column in ("answer", "solution") if column in row), "answer or solution")
    return tables.checked_row(row, {"problem": str | list, given: str}, row.where)


MathEnv = TaskSpec(Math, load_rows, hub=HUB_SETS["train"][0])
"""MATH as a TorchRL environment."""
