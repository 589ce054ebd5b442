"""ScoreGuard: rewards of answers under a deadline, and a typed failure in the place of each that has none."""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from grpo_rl.envs.isolation import IsolatedCalls
from grpo_rl.envs.task import Messages, Reward, Task, Unjudgeable, last_said, plays_turns

Kind = Literal["error", "timeout", "invalid", "unjudgeable"]
LARGEST = 3.4e38
"""What a reward may be: training keeps it in fp32."""
FEW = 80
"""Answers before which the fraction that failed says little; their number is taken for that of the first ones."""


class ScoreError(RuntimeError):
    """A task's scorer failed; the message names the task and the row."""


@dataclass(frozen=True)
class Failure:
    """Why an answer has no reward.

    Args:
        kind: ``error``: the scorer raised; ``timeout``: it took longer than it may; ``invalid``: it returned something
            else than the task's parts as finite numbers; ``unjudgeable``: no answer to this row can be judged.
        message: names the task, the row and the answer.
    """

    kind: Kind
    message: str


class Scorer:
    """A task's ways to score, without its rows, as they go to a process of their own."""

    def __init__(self, task: Task) -> None:
        self._task = task.without_rows()

    def __call__(self, method: str, *arguments: Any) -> Any:
        """What the task's ``score``, ``score_many`` or ``score_dialog`` returns."""
        return getattr(self._task, method)(*arguments)


class ScoreGuard:
    """Scores answers so that one scorer's accident costs one answer.

    Args:
        task: judges.
        deadline_s: seconds that the scoring of one answer may take; answers that are scored together have as many times
            that together. What takes longer is left behind in its thread, or killed where the task is ``isolated``:
            a thread can't be stopped, and code that never lets go of Python's interpreter, a regular expression that
            backtracks say, holds up its deadline too.
        max_failed_fraction: of all answers; beyond it the run stops, as it would train on an odd choice of answers.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, task: Task, deadline_s: float = 60.0, max_failed_fraction: float = 0.1) -> None:
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"env.score_timeout_s={deadline_s}; it must be a positive number of seconds")
        if not 0 <= max_failed_fraction <= 1:
            raise ValueError(f"env.max_failed_fraction={max_failed_fraction}; it must be between 0 and 1")
        self._task, self.deadline_s, self._max_failed = task, deadline_s, max_failed_fraction
        self._processes = IsolatedCalls(Scorer(task), deadline_s=deadline_s) if task.isolated else None
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self.judged = 0
        """Answers so far, the failed ones included."""
        self.failed: Counter[Kind] = Counter()
        """Answers without a reward, by kind."""
        self.examples: dict[Kind, str] = {}
        """The first failure of each kind."""

    @property
    def counts(self) -> dict[str, int]:
        """What was judged and what failed so far, as JSON-able numbers."""
        with self._lock:
            return {"judged": self.judged, **{f"failed_{kind}": count for kind, count in self.failed.items()}}

    def failures(self) -> tuple[dict[Kind, int], dict[Kind, str]]:
        """:attr:`failed` and :attr:`examples` at one moment, where another thread may be judging."""
        with self._lock:
            return dict(self.failed), dict(self.examples)

    def restore(self, counts: dict[str, int]) -> None:
        """Goes on counting from :attr:`counts`; other entries are left aside."""
        self.judged = counts.get("judged", 0)
        kinds: tuple[Kind, ...] = get_args(Kind)
        self.failed = Counter({kind: n for kind in kinds if (n := counts.get(f"failed_{kind}", 0))})

    def score(self, row: dict, responses: Sequence[str], where: str) -> list[Reward | Failure]:
        """The reward of each answer to one row.

        Args:
            where: names the row in messages.

        Raises:
            ScoreError: too many answers failed.
        """
        if not self._task.together:
            return self._checked(self._each("score", [(row, text) for text in responses]), responses, where)
        rows = [row] * len(responses)
        together = self._all_at_once(rows, responses)
        if not isinstance(together, (Exception, Sequence)) or isinstance(together, str):
            together = TypeError(f"score_many returned {together!r:.80}, no list of rewards")
        elif isinstance(together, Sequence) and len(together) != len(responses):
            together = TypeError(f"score_many returned {len(together)} rewards for {len(responses)} answers")
        results = [together] * len(responses) if isinstance(together, Exception) else together
        return self._checked(results, responses, where)

    def score_dialogs(self, row: dict, dialogs: Sequence[Messages], where: str) -> list[Reward | Failure]:
        """The reward of each conversation about one row; see :meth:`score`."""
        said = [last_said(messages) for messages in dialogs]
        if not plays_turns(self._task):
            return self.score(row, said, where)
        return self._checked(self._each("score_dialog", [(row, messages) for messages in dialogs]), said, where)

    def _each(self, method: str, calls: Sequence[tuple]) -> list[Any]:
        """What each call of the task returned or raised."""
        with self._turn:  # a task is asked once at a time, though a run may evaluate while answers come in
            if self._processes:
                return self._processes.map([(method, *arguments) for arguments in calls])
            function = getattr(self._task, method)
            return self._results([lambda arguments=arguments: function(*arguments) for arguments in calls])

    def _all_at_once(self, rows: Sequence[dict], responses: Sequence[str]) -> Any:
        """What ``score_many`` returned or raised."""
        deadline_s = self.deadline_s * max(1, len(responses))
        with self._turn:
            if self._processes:
                return self._processes.map([("score_many", rows, responses)], deadline_s)[0]
            return self._results([lambda: self._task.score_many(rows, responses)], deadline_s)[0]

    def _checked(self, results: Sequence[Any], answers: Sequence[str], where: str) -> list[Reward | Failure]:
        checked = [self._check(result, answer, where) for result, answer in zip(results, answers, strict=True)]
        self.record(checked)
        return checked

    def record(self, results: Sequence[Reward | Failure]) -> None:
        """Counts the results of answers that were judged.

        Raises:
            ScoreError: too many answers failed.
        """
        with self._lock:
            self.judged += len(results)
            for failure in results:
                if isinstance(failure, Failure):
                    self.failed[failure.kind] += 1
                    self.examples.setdefault(failure.kind, failure.message)
            failed = self.failed.total()
        if failed > self._max_failed * max(self.judged, FEW):
            counts = ", ".join(f"{count} {kind}" for kind, count in self.failed.items())
            raise ScoreError(
                f"{failed} of {self.judged} answers could not be scored ({counts}), more than "
                f"env.max_failed_fraction={self._max_failed} allows. The first of each kind:\n"
                + "\n".join(self.examples.values())
            )

    def _check(self, result: Any, answer: str, where: str) -> Reward | Failure:
        name, of = type(self._task).__name__, f"the answer was {answer[:200]!r}"
        if isinstance(result, Unjudgeable):
            return Failure("unjudgeable", f"{name} can't judge {where}: {result}")
        if isinstance(result, TimeoutError):
            return Failure("timeout", f"{name} ran out of time on {where}: {result}; {of}")
        if isinstance(result, Exception):
            return Failure("error", f"{name} failed on {where}: {type(result).__name__}: {result}; {of}")
        wanted = list(self._task.reward_parts)
        if not (isinstance(result, Reward) and _finite(result.parts) and set(result.parts) == set(wanted)):
            return Failure("invalid", f"{name} returned {result!r} on {where}, not finite numbers under {wanted}; {of}")
        if not _finite(result.measures):
            return Failure("invalid", f"{name} measured {result.measures!r} on {where}, not finite numbers; {of}")
        # A task may well return counts or truth values.
        return Reward(_floats(result.parts), _floats(result.measures))

    def _results(self, calls: Sequence[Callable[[], Any]], deadline_s: float | None = None) -> list[Any]:
        """What each call returned or raised; calls run one after the other, in a thread that may be left behind."""
        deadline_s = deadline_s or self.deadline_s
        results: list[Any] = []
        while len(results) < len(calls):
            done: queue.SimpleQueue[Any] = queue.SimpleQueue()
            left_behind = threading.Event()
            rest = calls[len(results) :]
            in_thread(_run, rest, done, left_behind)
            for _ in rest:
                try:
                    results.append(done.get(timeout=deadline_s))
                except queue.Empty:
                    left_behind.set()
                    results.append(TimeoutError(f"no result within {deadline_s:g} s, so its thread was left behind"))
                    break
        return results


def in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Calls the function in a thread that does not keep the process from ending."""
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _run(calls: Sequence[Callable[[], Any]], done: queue.SimpleQueue[Any], left_behind: threading.Event) -> None:
    for call in calls:
        if left_behind.is_set():
            return
        try:
            done.put(call())
        except Exception as error:
            done.put(error)
        except BaseException as error:  # a scorer that calls sys.exit() ends itself, not the run
            done.put(RuntimeError(f"{type(error).__name__}: {error}"))


def _floats(numbers: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items()}


def _finite(numbers: Any) -> bool:
    """Whether these are named numbers whose sum, too, is finite in fp32."""
    try:
        values = [float(value) for value in numbers.values()]
    except Exception:  # whatever a scorer may have put there
        return False
    return all(abs(value) <= LARGEST for value in [*values, sum(values)])
