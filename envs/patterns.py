"""Which of a user's regular expressions are found in a text, searched where a search that backtracks can be killed.

Without torch, as workers load it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from grpo_rl.envs.isolation import IsolatedCalls

DEADLINE_S = 5.0
"""Seconds for the patterns of one response; those that don't backtrack take microseconds."""
_CHUNK = 16


def found(
    patterns: tuple[str, ...], texts: Sequence[str], linear: Collection[str] = ()
) -> list[list[bool] | Exception]:
    """Of each text, whether each pattern is found in it; or a TimeoutError in the place of one that took too long.

    Python's `re` holds the interpreter while it searches, so that no thread could stop it.

    Args:
        linear: patterns that take time linear in any text. If all are, they are searched here, which is faster.

    >>> found((r"^a", r"b$"), ["ab", "ba"])
    [[True, True], [False, False]]
    """
    if all(pattern in linear for pattern in patterns):
        return [search(patterns, text) for text in texts]
    calls = [(patterns, text) for text in texts]
    results = _workers(os.getpid()).map(calls, chunk=_CHUNK)
    return [
        TimeoutError(f"{' or '.join(patterns)} took longer than {DEADLINE_S:g} s, so its process was killed")
        if isinstance(result, TimeoutError)
        else result
        for result in results
    ]


def search(patterns: tuple[str, ...], text: str) -> list[bool]:
    """Whether each pattern is found in the text, in this process."""
    return [_compiled(pattern).search(text) is not None for pattern in patterns]


_compiled = lru_cache(maxsize=64)(re.compile)


@lru_cache(maxsize=1)
def _workers(process_id: int) -> IsolatedCalls:
    return IsolatedCalls(search, deadline_s=DEADLINE_S)
