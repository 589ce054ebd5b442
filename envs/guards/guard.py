"""ScoreGuard: rewards of responses under a deadline, and a typed failure in the place of each that has none."""

from __future__ import annotations

import copy
import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from grpo_rl.by_name import one_line
from grpo_rl.envs.guards.isolation import START_TIMEOUT_S, IsolatedCalls
from grpo_rl.envs.task import Messages, Reward, Spent, Task, Unjudgeable, last_said, plays_turns
from grpo_rl.storage.masking import shown
from grpo_rl.waits import Wait, waiting

Kind = Literal["error", "timeout", "invalid", "unjudgeable"]
LARGEST = 3.4e38
"""The largest reward: training keeps it in fp32."""
FEW = 80
"""The least number of responses that the failed fraction is taken of: of fewer it says little."""
LATER_S = 0.5
"""Seconds that a thread has beyond the deadline, so that a task that kills its own scorer can say so before."""

REMEDY = "the response has no reward; make the scorer faster, or raise env.score_timeout_s"
EXCERPT = 200
"""Characters of a response in messages."""


class ScoreError(RuntimeError):
    """A task's scorer failed; the message names the task and the row."""


@dataclass(frozen=True)
class Failure:
    """The reason why a response has no reward.

    Args:
        kind: ``error``: the scorer raised; ``timeout``: it took longer than it may; ``invalid``: it returned something
            else than the task's parts as finite numbers; ``unjudgeable``: no response to this row can be judged.
        message: names the task, the row and the response; as it may be shown, since it quotes what others wrote.
    """

    kind: Kind
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", shown(self.message))


def _scored(task: Task, deadline_s: float, method: str, *arguments: Any) -> Any:
    """The result of the task's ``score``, ``score_many`` or ``score_dialog``, in a process of its own."""
    task.ready(deadline_s)
    return getattr(task, method)(*arguments)


class ScoreGuard:
    """Scores responses so that one scorer's accident costs one response.

    One rule for time: each call of the scorer has ``deadline_s``, whether it judges one response or a whole group.
    What happens to a scorer that takes longer:

    - A call in a process of its own is killed: the task is ``isolated``, or gives its user's code to one.
    - A call in a thread is left behind: a thread can't be stopped. One that never lets go of Python's interpreter, as
      a regular expression that backtracks, stops this process with it, deadlines and all: isolate such tasks.

    Args:
        deadline_s: seconds that one call of the scorer may take.
        max_failed_fraction: share of all responses; beyond it the run stops, as the responses that
            could be scored are no fair sample.
    """

    def __init__(self, task: Task, deadline_s: float = 60.0, max_failed_fraction: float = 0.1) -> None:
        self._task, self.deadline_s, self._max_failed = task, deadline_s, max_failed_fraction
        self._processes: IsolatedCalls | None = None
        if task.isolated:
            self._processes = IsolatedCalls(partial(_scored, task.without_rows(), deadline_s), deadline_s=deadline_s)
        self._parts, self._name_of_task = set(task.reward_parts), type(task).__name__
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self.judged = 0
        """Responses so far, the failed ones included."""
        self.failed: Counter[Kind] = Counter()
        """Responses without a reward, by kind."""
        self.examples: dict[Kind, str] = {}
        """The first failure of each kind."""
        self.tell: Callable[[str], None] = _to_stderr
        """Gets the message of the first failure of each kind, when its group has been judged."""
        self._told: set[str] = set()

    def apart(self) -> ScoreGuard:
        """A guard that scores as this one, in turns with it and told alike, but counts for itself and has no limit."""
        other = copy.copy(self)
        other._max_failed, other.judged, other.failed, other.examples = 1.0, 0, Counter(), {}
        other._told = set()
        other.tell = lambda text: self.tell(text)  # which may be replaced later
        return other

    def tell_once(self, kind: str, text: str) -> None:
        """Tells the first text of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            self.tell(text)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of what was judged and what failed so far, as JSON-able numbers."""
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
        """The reward of each response to one row, which ``where`` names in messages.

        Raises:
            ScoreError: too many responses failed.
        """
        if not self._task.scores_group:
            return self._checked(self._results("score", [(row, text) for text in responses], where), responses, where)
        rows = [row] * len(responses)
        [scored] = self._results("score_many", [(rows, responses)], where)
        if not isinstance(scored, (Exception, Sequence)) or isinstance(scored, str):
            scored = TypeError(f"score_many returned {scored!r:.80}, no list of rewards")
        elif isinstance(scored, Sequence) and len(scored) != len(responses):
            scored = TypeError(f"score_many returned {len(scored)} rewards for {len(responses)} responses")
        results = [scored] * len(responses) if isinstance(scored, Exception) else scored
        return self._checked(results, responses, where)

    def score_dialogs(self, row: dict, dialogs: Sequence[Messages], where: str) -> list[Reward | Failure]:
        """The reward of each conversation about one row; see :meth:`score`."""
        said = [last_said(messages) for messages in dialogs]
        if not plays_turns(self._task):
            return self.score(row, said, where)
        calls = [(row, messages) for messages in dialogs]
        return self._checked(self._results("score_dialog", calls, where), said, where)

    def _results(self, method: str, calls: Sequence[tuple], where: str) -> list[Any]:
        if self._processes:
            # Processes start with the first call, and again after one that was killed.
            with self._waiting(where, self.deadline_s + START_TIMEOUT_S) as wait:
                arguments = [(method, *arguments) for arguments in calls]
                return self._processes.map(arguments, on_result=lambda _: wait.again())
        with self._turn:  # one call at a time, though conversations end by themselves and a run may evaluate meanwhile
            self._task.ready(self.deadline_s)
            return self._in_thread(getattr(self._task, method), calls, where)

    def _in_thread(self, function: Callable[..., Any], calls: Sequence[tuple], where: str) -> list[Any]:
        """The result or exception of each call; calls run one after the other, in a thread that may be left behind."""
        results: list[Any] = []
        while len(results) < len(calls):
            done: queue.SimpleQueue[Any] = queue.SimpleQueue()
            left_behind, rest = threading.Event(), calls[len(results) :]
            in_thread(_run, function, rest, done, left_behind)
            try:
                for _ in rest:
                    with self._waiting(where, self.deadline_s):
                        results.append(done.get(timeout=self.deadline_s + LATER_S))
            except queue.Empty:
                results.append(TimeoutError(f"no result within {self.deadline_s:g} s, so its thread was left behind"))
            finally:
                left_behind.set()
        return results

    def replies(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The result or exception of each call, all made at the same time; a late thread is left behind."""
        allowed_s = dict.fromkeys(range(len(calls)), self.deadline_s)
        with waiting("the task's reply", deadline_s=self.deadline_s):
            results = dict(finished(dict(enumerate(calls)), allowed_s))
        return [results[i] for i in allowed_s]

    def _waiting(self, where: str, deadline_s: float) -> Wait:
        return waiting(f"the scorer {self._name_of_task}", where, deadline_s, remedy=REMEDY)

    def _checked(self, results: Sequence[Any], responses: Sequence[str], where: str) -> list[Reward | Failure]:
        if spent := next((result for result in results if isinstance(result, Spent)), None):
            raise ScoreError(str(spent))
        checked = [self._check(result, response, where) for result, response in zip(results, responses, strict=True)]
        self.record(checked)
        return checked

    def record(self, results: Sequence[Reward | Failure], row: dict | None = None) -> None:
        """Counts the results of responses to a row that were judged, and tells of failures that are new.

        Raises:
            ScoreError: too many responses failed.
        """
        failures = [result for result in results if isinstance(result, Failure)]
        with self._lock:
            self.judged += len(results)
            first: dict[Kind, Failure] = {}
            for failure in failures:
                self.failed[failure.kind] += 1
                if failure.kind not in self.examples:
                    self.examples[failure.kind] = failure.message
                    first[failure.kind] = failure
            failed = self.failed.total()
        for failure in first.values():
            self.tell(f"No reward ({failure.kind}), the first of its kind: {failure.message}")
        if failed > self._max_failed * max(self.judged, FEW):
            counts = ", ".join(f"{count} {kind}" for kind, count in self.failed.items())
            allowed = f"more than env.max_failed_fraction={self._max_failed} allows"
            first_ones = f"The first of each kind: {'; '.join(self.examples.values())}"
            raise ScoreError(
                f"{failed} of {self.judged} responses could not be scored ({counts}), {allowed}. {first_ones}"
            )

    def _check(self, result: Any, response: str, where: str) -> Reward | Failure:
        if isinstance(result, Reward):
            parts, measures = _finite(result.parts), _finite(result.measures)
            whole = parts is not None and (self._task.parts_may_lack or len(parts) == len(self._parts))
            if parts is not None and measures is not None and whole and parts.keys() <= self._parts:
                return Reward(parts, measures)
        return self._failure(result, response, where)

    def _failure(self, result: Any, response: str, where: str) -> Failure:
        name, of = self._name_of_task, f"the response was {response[:EXCERPT]!r}"
        if isinstance(result, Unjudgeable):
            return Failure("unjudgeable", f"{name} can't judge {where}: {result}")
        if isinstance(result, TimeoutError):
            return Failure("timeout", f"{name} ran out of time on {where}: {result}; {of}")
        if isinstance(result, Exception):
            return Failure("error", f"{name} failed on {where}: {one_line(result)}; {of}")
        wanted = list(self._task.reward_parts)
        return Failure("invalid", f"{name} returned {result!r} on {where}, not finite numbers under {wanted}; {of}")


_idle: deque[queue.SimpleQueue[Any]] = deque()
"""A queue of each idle thread, from which it takes its next call."""
os.register_at_fork(after_in_child=_idle.clear)


def in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Calls the function in a thread that does not keep the process from ending; idle threads are reused."""
    try:
        calls = _idle.pop()
    except IndexError:
        calls = queue.SimpleQueue()
        threading.Thread(target=_work, args=(calls,), daemon=True).start()
    calls.put((function, arguments))


def _work(calls: queue.SimpleQueue[Any]) -> None:
    while True:
        function, arguments = calls.get()
        function(*arguments)
        del function, arguments
        _idle.append(calls)


def finished(calls: Mapping[int, Callable[[], Any]], allowed_s: Mapping[int, float]) -> Iterator[tuple[int, Any]]:
    """Each call's number and :func:`outcome` as it comes, all made at the same time; a late thread is left behind."""
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    left, begun = dict(allowed_s), time.monotonic()
    for i, call in calls.items():
        in_thread(lambda i=i, call=call: done.put((i, outcome(call))))
    while left:
        i = min(left, key=left.__getitem__)
        try:
            i, result = done.get(timeout=max(begun + left[i] - time.monotonic(), 0.0))
        except queue.Empty:
            result = TimeoutError(f"no reply within {left[i]:g} s")
        if left.pop(i, None) is not None:
            yield i, result


def _run(
    function: Callable[..., Any], calls: Sequence[tuple], done: queue.SimpleQueue[Any], left_behind: threading.Event
) -> None:
    for arguments in calls:
        if left_behind.is_set():
            return
        done.put(outcome(function, *arguments))


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or the exception that it raised."""
    try:
        return function(*arguments)
    except Exception as error:
        return error
    except BaseException as error:  # a scorer or tool that calls sys.exit() ends itself, not the run
        return RuntimeError(one_line(error))


def _to_stderr(text: str) -> None:
    print(shown(text), file=sys.stderr, flush=True)


def _finite(numbers: Any) -> dict[str, float] | None:
    """Named numbers, counts or truth values as floats; None unless they and their sum are finite in fp32."""
    try:
        floats = {name: float(value) for name, value in numbers.items()}
    except Exception:  # whatever a scorer may have put there
        return None
    return floats if all(abs(value) <= LARGEST for value in [*floats.values(), sum(floats.values())]) else None
