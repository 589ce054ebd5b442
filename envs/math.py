"""MATH: competition problems, judged on the boxed answer by math-verify, in processes that can be killed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from grpo_rl.envs import tables
from grpo_rl.envs.base import LLMEnv, Messages, Reward, Task, Unjudgeable
from grpo_rl.envs.grading.boxed import equal
from grpo_rl.envs.grading.tags import last_boxed
from grpo_rl.envs.guards.isolation import IsolatedCalls, WorkerDied
from grpo_rl.envs.task import check_weights

__all__ = ["Math", "MathEnv", "last_boxed", "load_rows", "verify"]

HUB_SETS = {"train": ("DigitalLearningGmbH/MATH-lighteval", "train"), "test": ("HuggingFaceH4/MATH-500", "test")}
"""The hub's data set and its split, for each of ours; the 500 test problems are none of the training ones."""

COLUMNS = ("problem", "answer", "solution")
"""What is read of the data; some sets have whole conversations beside it."""

SYSTEM_PROMPT = r"Reason step by step, and put the final answer within \boxed{}."
DEADLINE_S = 5.0
"""Seconds for one comparison; nearly all take milliseconds."""
MAX_CHARS = 300
"""The longest answer that is judged. The longest of MATH-500 has 53; a parser can be made to work hard by much text."""

# Written as it is here, an integer is read as itself, and two of them differ by more than the rounding of floats.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,11}")


class Verdict(NamedTuple):
    """Whether a response equals the gold answer, None if the gold can't be parsed; and whether it took too long to say.

    Args:
        timed_out: the comparison ran out of time or memory through the response's doing, which so is wrong.
    """

    equal: bool | None
    timed_out: bool = False


class _Unknown(RuntimeError):
    """The machine, not the response, kept a comparison from its end."""


class Math(Task):
    r"""Problems with a boxed answer; an answer earns ``correctness`` and ``answer_format``.

    Args:
        rows: ``problem``, and ``answer`` or ``solution``: the gold answer is ``answer``, else what the solution's last
            ``\boxed{}`` holds.
        correctness: paid where the answer equals the gold answer (see :func:`verify`).
        answer_format: paid where the answer has a box that is closed.
        deadline_s: seconds for one comparison.
        system_prompt: the first message; None or an empty text leaves it out.
        examples: ``problem`` and ``solution`` of solved problems, shown as earlier turns.

    Raises:
        ValueError: a weight is not a finite number, a deadline is not positive, an example lacks a column, or not one
            row has a gold answer.
    """

    reward_parts = ("correctness", "answer_format")

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        correctness: float = 1.0,
        answer_format: float = 0.1,
        deadline_s: float = DEADLINE_S,
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self._weights = {"correctness": correctness, "answer_format": answer_format}
        check_weights(self._weights)
        if not deadline_s > 0:
            raise ValueError(f"env.reward.deadline_s={deadline_s}; a comparison needs some seconds")
        self._deadline_s, self._budget_s = deadline_s, inf
        self._before: Messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        for index, example in enumerate(examples or ()):
            for column in ("problem", "solution"):
                if not isinstance(example.get(column), str):
                    raise ValueError(f"env.examples[{index}] has no text {column}; its columns are {list(example)}")
            self._before += [
                {"role": "user", "content": example["problem"]},
                {"role": "assistant", "content": example["solution"]},
            ]
        self.rows = rows
        if len(rows) and all(self.gold(row) is None for row in rows):
            raise ValueError(
                f"none of the {len(rows)} rows has a gold answer; give a column answer, or solutions that end on "
                r"\boxed{...}"
            )

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the problem."""
        return [*self._before, {"role": "user", "content": row["problem"]}]

    def ready(self, deadline_s: float) -> None:
        """Notes how long the responses of a group may take together."""
        self._budget_s = deadline_s

    def score(self, row: dict, response: str) -> Reward:
        r"""Whether the boxed answer is right, and whether there is one.

        A response whose comparison does not end in time, nor when nothing else is under way, is wrong, and has the
        measure ``timed_out``. One whose process was killed, as by a machine short of memory, has no reward.

        Raises:
            Unjudgeable: the row has no gold answer that can be parsed.

        >>> Math([]).score({"problem": "1/4 + 1/4?", "answer": r"\frac{1}{2}"}, r"That is $\boxed{0.5}$.").parts
        {'correctness': 1.0, 'answer_format': 0.1}
        """
        [result] = self.score_many([row], [response])
        if isinstance(result, Exception):
            raise result
        return result

    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> list[Reward | Exception]:
        """As :meth:`score`, with all comparisons in the workers together."""
        golds = [self.gold(row) or "" for row in rows]
        verdicts = _verdicts(golds, responses, self._deadline_s, self._budget_s)
        return [self._reward(*judged) for judged in zip(golds, responses, verdicts, strict=True)]

    def gold(self, row: dict) -> str | None:
        """The gold answer, without its box."""
        return _unboxed(row["answer"]) if row.get("answer") else last_boxed(row.get("solution", ""))

    def _reward(self, gold: str, response: str, verdict: Verdict | Exception) -> Reward | Exception:
        if isinstance(verdict, Exception):
            return verdict
        if verdict.equal is None:
            return Unjudgeable(f"the gold answer {gold[:200]!r} can't be parsed")
        earned = {"correctness": verdict.equal, "answer_format": last_boxed(response) is not None}
        parts = {name: float(self._weights[name]) if earned[name] else 0.0 for name in self.reward_parts}
        return Reward(parts, {"timed_out": float(verdict.timed_out)})


class MathEnv(LLMEnv):
    r"""MATH as a TorchRL environment.

    "Compute $\sin 45^\circ$." An answer that is right, however written, and boxed, earns 1.1:

    >>> row = {"problem": r"Compute $\sin 45^\circ$.", "answer": r"\frac{\sqrt{2}}{2}"}
    >>> reward = Math([row]).score(row, r"The legs of [...], so it is $\boxed{1/\sqrt{2}}$.")
    >>> reward.total, reward.parts
    (1.1, {'correctness': 1.0, 'answer_format': 0.1})

    Args:
        num_envs: prompts in flight.
        repeats: answers to each, the group size G.
        tokenizer: of the model that answers.
        path: see :func:`load_rows`.
        split: see :func:`load_rows`.
        system_prompt: see :class:`Math`.
        examples: see :class:`Math`.
        reward: weights and deadline of :class:`Math`, as in the config's ``env.reward``.
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
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, str]] = (),
        reward: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        rows = load_rows(path, split)
        task = Math(rows, system_prompt=system_prompt, examples=examples, **(reward or {}))
        super().__init__(task, tokenizer, num_envs, repeats, **settings)


def verify(gold: str, response: str) -> bool | None:
    r"""Whether ``response`` answers with ``gold``; None if the gold answer can't be parsed: nothing can be said then.

    The judge is math-verify, https://github.com/huggingface/Math-Verify: answers that are equal as mathematics are
    equal, and decimals count to six places. What it is given:

    - Of the response, only what its last ``\boxed{}`` holds: an earlier box is a step, and an answer outside a box is
      none. A last box that isn't closed, or holds more than :data:`MAX_CHARS` characters, is a wrong answer.
    - Of the gold answer, its box if it has one, otherwise all.

    An answer is wrong, too, where the comparison takes longer than :data:`DEADLINE_S`, twice, or ends its process; a
    gold answer that does so by itself can't be parsed. It runs in worker processes, so that any thread may ask.

    >>> verify(r"\frac{1}{2}", r"So it is $\boxed{0.5}$."), verify("1/2", r"\boxed{1/2}, no, \boxed{2}"), verify("", "")
    (True, False, None)
    """
    [verdict] = _verdicts([gold], [response], DEADLINE_S)
    if isinstance(verdict, Exception):
        raise verdict
    return verdict.equal


_TOO_MUCH = (TimeoutError, WorkerDied, MemoryError)
_SPENT = 0.9
"""The part of the budget that may be spent: what follows needs some of it."""


def _verdicts(
    golds: Sequence[str], responses: Sequence[str], deadline_s: float, budget_s: float = inf
) -> list[Verdict | Exception]:
    """Of each pair as :func:`verify`, with the exception in the place of one that failed."""
    pairs = [_pair(gold, response) for gold, response in zip(golds, responses, strict=True)]
    verdicts: dict[tuple[str, str | None], Verdict | Exception] = {}
    # Many answers of a group are the same: each is compared once.
    for gold, answer in dict.fromkeys(pairs):
        if len(gold) > MAX_CHARS:
            verdicts[gold, answer] = Verdict(None)
        elif _INTEGER.fullmatch(gold) and (answer is None or _INTEGER.fullmatch(answer)):
            verdicts[gold, answer] = Verdict(gold == answer)
    open_pairs = [pair for pair in dict.fromkeys(pairs) if pair not in verdicts]
    if open_pairs:
        verdicts |= zip(open_pairs, _compared(open_pairs, deadline_s, budget_s * _SPENT), strict=True)
    return [verdicts[pair] for pair in pairs]


def _compared(pairs: Sequence[tuple[str, str | None]], deadline_s: float, budget_s: float) -> list[Verdict | Exception]:
    workers, until = _workers(deadline_s, os.getpid()), time.monotonic() + budget_s
    # Half of the time is kept for what has to be repeated.
    results = workers.map(pairs, min(deadline_s, budget_s / 2 * workers.workers / len(pairs)), budget_s)
    late = [at for at, result in enumerate(results) if isinstance(result, (TimeoutError, MemoryError))]
    for done, at in enumerate(late):
        # Alone: the machine may have been busy with the others.
        left_s = until - time.monotonic()
        if left_s <= 0:
            results[at] = _Unknown("the comparison took too long, and no time was left to repeat it alone")
        else:
            [results[at]] = workers.map([pairs[at]], min(deadline_s, left_s / (len(late) - done)), left_s)
    results = [_Unknown(str(result)) if _was_killed(result) else result for result in results]
    # Who is to blame for a comparison that doesn't end: the gold answer, if it alone doesn't either.
    golds = {gold for (gold, _), result in zip(pairs, results, strict=True) if isinstance(result, _TOO_MUCH)}
    alone = dict(zip(golds, workers.map([(gold, gold) for gold in golds]), strict=True))

    def verdict(gold: str, result: Any) -> Verdict | Exception:
        if not isinstance(result, _TOO_MUCH):
            return result if isinstance(result, Exception) else Verdict(result)
        blamed = alone[gold]
        if isinstance(blamed, Exception) and not isinstance(blamed, _TOO_MUCH):
            return blamed
        return Verdict(False, timed_out=True) if blamed is True else Verdict(None)

    return [verdict(gold, result) for (gold, _), result in zip(pairs, results, strict=True)]


def _was_killed(result: Any) -> bool:
    """Whether another process, as the kernel of a machine short of memory, ended the comparison's."""
    return isinstance(result, WorkerDied) and result.end == signal.SIGKILL.name


def _pair(gold: str, response: str) -> tuple[str, str | None]:
    return _unboxed(gold), last_boxed(response, MAX_CHARS)


def _unboxed(gold: str) -> str:
    boxed = last_boxed(gold)
    return gold.strip() if boxed is None else boxed


@lru_cache(maxsize=8)
def _workers(deadline_s: float, process_id: int) -> IsolatedCalls:
    """The same for all tasks of this process: a worker takes a second to start."""
    return IsolatedCalls(equal, deadline_s=deadline_s)


def load_rows(path: str | Path | None = None, split: str = "train") -> list[dict]:
    """Problems with ``problem``, and ``answer`` or ``solution``.

    Args:
        path: a file or a hub name, see :func:`grpo_rl.envs.tables.load_rows`; None takes the hub's :data:`HUB_SETS`.
        split: ``train`` or ``test``; a file is one split.

    Raises:
        ValueError: there is no such file or split, the hub can't be reached, or a row lacks a column.
    """
    if path is None and split not in HUB_SETS:
        raise ValueError(f"the math task has no split {split!r}; it has {' and '.join(HUB_SETS)}")
    source, source_split = (str(path), split) if path is not None else HUB_SETS[split]
    rows = tables.load_rows(source, source_split, COLUMNS)
    return [_checked(row, f"{source}, row {index}") for index, row in enumerate(rows)]


def _checked(row: dict, where: str) -> dict:
    row = dict(row)
    answer = row.pop("answer", None)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)  # as some sets of integer answers write it
    if answer not in (None, ""):
        row["answer"] = answer
    for columns in (("problem",), ("answer", "solution")):
        given = next((column for column in columns if column in row), None)
        if given is None:
            raise ValueError(
                f"{where} has no {' or '.join(columns)}; its columns are {list(row)}; rename or add the column"
            )
        if not isinstance(row[given], str):
            raise ValueError(f"{where}: {given} is {row[given]!r}; it must be a text")
    return row
