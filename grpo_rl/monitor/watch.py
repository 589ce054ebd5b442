"""RewardWatch: warns when the reward is earned in a way that nobody wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

WINDOW = 10
"""Steps that are averaged before they are compared: single steps are too noisy."""
LONGER, BY_LENGTH = 1.5, 0.5
"""Growth of the mean length, and correlation of length and reward inside groups, that together are a warning."""
REPEATED, MORE_REPEATED = 0.3, 0.15
"""Share of repeated n-grams, and its growth, that together are a warning."""
ERRORS = 2.0
"""Standard errors of the difference by which the held-out reward has to fall."""


class RewardWatch:
    """Reads a run's metrics, line by line, and warns once of each kind of trouble.

    - ``held_out``: the training reward rose while the held-out reward fell.
    - ``length``: responses grew longer, and in their groups the longer ones earn more.
    - ``repetition``: responses repeat themselves far more than at first.

    >>> watch = RewardWatch()
    >>> for step in range(1, 41):
    ...     for warning in watch.update({"step": step, "reward/mean": step / 40, "response/repetition": step / 50}):
    ...         print(warning)
    Step 20: responses repeat themselves: 31 % of their 4-grams were there before, 11 % in the first 10 steps. ...
    """

    def __init__(self) -> None:
        self.warnings: dict[str, str] = {}
        """The warnings so far, by kind."""
        self._steps: list[Mapping[str, float]] = []
        self._evaluations: list[Mapping[str, float]] = []

    @classmethod
    def over(cls, rows: Iterable[Mapping[str, float]]) -> RewardWatch:
        """A watch that has read these lines."""
        watch = cls()
        for row in rows:
            watch.update(row)
        return watch

    def update(self, row: Mapping[str, float]) -> list[str]:
        """Takes a line of metrics, and returns the warnings that are due now for the first time."""
        if "reward/mean" in row:
            self._steps.append(row)
        found = {"length": self._length(), "repetition": self._repetition()}
        if "eval/reward" in row:
            found["held_out"] = self._held_out(row)
            self._evaluations.append(row)
        new = {kind: text for kind, text in found.items() if text and kind not in self.warnings}
        self.warnings |= {kind: f"Step {int(row['step'])}: {text}" for kind, text in new.items()}
        return [self.warnings[kind] for kind in new]

    def _held_out(self, now: Mapping[str, float]) -> str | None:
        if not self._evaluations:
            return None
        best = max(self._evaluations, key=lambda row: row["eval/reward"])
        fall = best["eval/reward"] - now["eval/reward"]
        error = math.hypot(*(row.get("eval/standard_error", 0.0) for row in (best, now)))
        then = [row for row in self._steps if row["step"] <= best["step"]][-WINDOW:] or self._steps[:WINDOW]
        before, after = _mean(then, "reward/mean"), _mean(self._steps[-WINDOW:], "reward/mean")
        if fall <= ERRORS * error or fall <= 0 or not after > before:
            return None
        return (
            f"held-out reward fell from {best['eval/reward']:.3f} (step {int(best['step'])}) to "
            f"{now['eval/reward']:.3f} while the training reward rose from {before:.3f} to {after:.3f}: the policy "
            "learns what pays and not what is asked, or the training problems by heart. Read responses in "
            "completions.parquet, and go back to that step's checkpoint"
        )

    def _length(self) -> str | None:
        first, last = self._ends("response/mean_length", "response/length_correlation")
        if not first:
            return None
        before, after = _mean(first, "response/mean_length"), _mean(last, "response/mean_length")
        correlation = _mean(last, "response/length_correlation")
        if after < LONGER * before or correlation < BY_LENGTH:
            return None
        return (
            f"responses grew from {before:.0f} to {after:.0f} tokens, and inside a group the longer ones earn more "
            f"(correlation {correlation:.2f}): length may be what the reward pays for. Read responses in "
            "completions.parquet; env.rewards.soft_overlong_punishment takes from responses that are too long"
        )

    def _repetition(self) -> str | None:
        first, last = self._ends("response/repetition")
        if not first:
            return None
        before, after = _mean(first, "response/repetition"), _mean(last, "response/repetition")
        if after < REPEATED or after < before + MORE_REPEATED:
            return None
        return (
            f"responses repeat themselves: {100 * after:.0f} % of their 4-grams were there before, "
            f"{100 * before:.0f} % in the first {WINDOW} steps. Read responses in completions.parquet; "
            "env.rewards.repetition_penalty takes from them"
        )

    def _ends(self, *names: str) -> tuple[Sequence[Mapping[str, float]], Sequence[Mapping[str, float]]]:
        """The first and the last steps that have these metrics; nothing while they would overlap."""
        rows = [row for row in self._steps if all(name in row for name in names)]
        return (rows[:WINDOW], rows[-WINDOW:]) if len(rows) >= 2 * WINDOW else ((), ())


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return fmean(row[name] for row in rows) if rows else math.nan
