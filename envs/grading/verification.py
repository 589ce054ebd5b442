"""Compares responses with gold answers as mathematics, by math-verify in killable processes. Without torch."""

import os
import re
import signal
import time
from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from grpo_rl.envs.grading.boxed import equal
from grpo_rl.envs.grading.tags import last_boxed
from grpo_rl.envs.guards.isolation import SPENT, IsolatedCalls, WorkerDied
from grpo_rl.envs.task import raised

DEADLINE_S = 5.0
"""Seconds for one comparison; nearly all take milliseconds."""
MAX_CHARS = 300
"""The longest answer that is judged. The longest of MATH-500 has 53; a parser can be made to work hard by much text."""

# Written as it is here, an integer is read as itself, and two of them differ by more than the rounding of floats.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,11}")


class Verdict(NamedTuple):
    """A comparison's outcome: whether both are equal, None if the gold can't be parsed.

    If it ran out of time or memory because of the response, it is ``timed_out``, which counts as wrong.
    """

    equal: bool | None
    timed_out: bool = False


class _Unknown(RuntimeError):
    """A comparison did not finish because of the machine, not the response."""


def verify(gold: str, response: str) -> bool | None:
    r"""True if ``response`` gives ``gold`` as its answer; None if the gold answer can't be parsed.

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
    return raised(verdicts([gold], [response], DEADLINE_S)[0]).equal


_TOO_MUCH = (TimeoutError, WorkerDied, MemoryError)


def verdicts(
    golds: Sequence[str], responses: Sequence[str], deadline_s: float, budget_s: float = inf
) -> list[Verdict | Exception]:
    """The verdict on each pair, as :func:`verify` gives it, with the exception in the place of one that failed."""
    pairs = [(unboxed(gold), last_boxed(text, MAX_CHARS)) for gold, text in zip(golds, responses, strict=True)]
    known: dict[tuple[str, str | None], Verdict | Exception] = {}
    # Many responses of a group have the same answer: each is compared once.
    for gold, answer in dict.fromkeys(pairs):
        if len(gold) > MAX_CHARS:
            known[gold, answer] = Verdict(None)
        elif _INTEGER.fullmatch(gold) and (answer is None or _INTEGER.fullmatch(answer)):
            known[gold, answer] = Verdict(gold == answer)
    open_pairs = [pair for pair in dict.fromkeys(pairs) if pair not in known]
    if open_pairs:
        known |= zip(open_pairs, _compared(open_pairs, deadline_s, budget_s * SPENT), strict=True)
    return [known[pair] for pair in pairs]


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
    for at, result in enumerate(results):
        # By another process, as the kernel of a machine short of memory.
        if isinstance(result, WorkerDied) and result.end == signal.SIGKILL.name:
            results[at] = _Unknown(str(result))
    # A comparison that doesn't end is due to the gold answer, if that compared with itself doesn't end either.
    golds = {gold for (gold, _), result in zip(pairs, results, strict=True) if isinstance(result, _TOO_MUCH)}
    alone = dict(zip(golds, workers.map([(gold, gold) for gold in golds]), strict=True))

    def verdict(gold: str, result: Any) -> Verdict | Exception:
        if not isinstance(result, _TOO_MUCH):
            return result if isinstance(result, Exception) else Verdict(result)
        own = alone[gold]
        if isinstance(own, Exception) and not isinstance(own, _TOO_MUCH):
            return own
        return Verdict(False, timed_out=True) if own is True else Verdict(None)

    return [verdict(gold, result) for (gold, _), result in zip(pairs, results, strict=True)]


def unboxed(gold: str) -> str:
    """The gold answer without its box."""
    boxed = last_boxed(gold)
    return gold.strip() if boxed is None else boxed


@lru_cache(maxsize=8)
def _workers(deadline_s: float, process_id: int) -> IsolatedCalls:
    """The workers of all tasks of this process: one takes a second to start."""
    return IsolatedCalls(equal, deadline_s=deadline_s)
