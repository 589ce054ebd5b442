"""Searches texts for a user's regular expressions, in processes that can be killed where a search backtracks.

Without torch, as workers load it.
"""

import math
import os
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from grpo_rl.envs.guards.isolation import SPENT, IsolatedCalls

DEADLINE_S = 5.0
"""Seconds for one pattern in one response, at most; a pattern that doesn't backtrack takes microseconds."""


def found(
    patterns: tuple[str, ...], texts: Sequence[str], linear: Collection[str] = (), budget_s: float = math.inf
) -> list[list[bool] | Exception]:
    """For each text, whether each pattern is in it; a text that took too long has a TimeoutError in its place.

    Python's `re` holds the interpreter while it searches, so that no thread could stop it.

    Args:
        linear: patterns that take time linear in any text: they are searched here, which is faster.
        budget_s: seconds for all texts in all. Each search has its share of them, so that those that backtrack leave
            time for the others.

    >>> found((r"^a", r"b$"), ["ab", "ba"])
    [[True, True], [False, False]]
    """
    calls = [(pattern, text) for text in texts for pattern in patterns if pattern not in linear]
    results = iter(_away(calls, budget_s * SPENT) if calls else ())
    of_texts: list[list[bool] | Exception] = []
    for text in texts:
        matches = [search(pattern, text) if pattern in linear else next(results) for pattern in patterns]
        failed = next((match for match in matches if isinstance(match, Exception)), None)
        of_texts.append(failed or [match is True for match in matches])
    return of_texts


def search(pattern: str, text: str) -> bool:
    """True if the pattern is found in the text, in this process."""
    return re.search(pattern, text) is not None


def _away(calls: Sequence[tuple[str, str]], budget_s: float) -> list[bool | Exception]:
    workers = _workers(os.getpid())
    deadline_s = min(DEADLINE_S, budget_s * workers.workers / len(calls))
    results = workers.map(calls, deadline_s, budget_s)
    return [
        TimeoutError(f"the search for {pattern} was stopped: {result}") if isinstance(result, TimeoutError) else result
        for (pattern, _), result in zip(calls, results, strict=True)
    ]


@lru_cache(maxsize=1)
def _workers(process_id: int) -> IsolatedCalls:
    return IsolatedCalls(search, deadline_s=DEADLINE_S)
