"""VerdictCache: scores of judges on this machine, by digests of all that they depend on."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from grpo_rl.storage.cache import cache_folder

LOCKED_S = 5.0
"""Seconds to wait for a file that another process has locked: a verdict takes no longer to write."""


def cache_file() -> Path:
    """The file of verdicts on this machine: digests and scores, without texts."""
    return cache_folder() / "judge.sqlite"


class VerdictCache:
    """Scores by digest. A file that can't be used is told once, and then left alone: verdicts are worth more."""

    def __init__(self) -> None:
        self._usable = True

    def get(self, digest: str) -> float | None:
        """The score under a digest; None where there is none."""
        if self._usable:
            try:
                with closing(_opened()) as cache:
                    row = cache.execute("SELECT score FROM verdicts WHERE digest = ?", (digest,)).fetchone()
                return row and row[0]
            except (sqlite3.Error, OSError) as error:
                self._leave(error)
        return None

    def put(self, digest: str, score: float) -> None:
        """Keeps a score."""
        if self._usable:
            try:
                with closing(_opened()) as cache, cache:
                    cache.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (digest, score))
            except (sqlite3.Error, OSError) as error:
                self._leave(error)

    def _leave(self, error: Exception) -> None:
        self._usable = False
        remedy = "; delete it" if "not a database" in str(error) else ""
        print(f"env.rewards.judge: {cache_file()}: {error}{remedy}; verdicts are not cached now", file=sys.stderr)


def _opened() -> sqlite3.Connection:
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    cache = sqlite3.connect(file, timeout=LOCKED_S)
    try:
        cache.execute("PRAGMA synchronous = OFF")  # a verdict that a power cut takes is asked for again
        cache.execute("CREATE TABLE IF NOT EXISTS verdicts (digest TEXT PRIMARY KEY, score REAL)")
    except sqlite3.Error:
        cache.close()
        raise
    return cache
