"""Curriculum: rows whose pass rate in this run is between bounds are drawn; the others rest."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_rl.envs.task import Reward, Task
from grpo_rl.section import Section, read_section, setting

ROUNDING = 1e-9
"""Relative difference that the scale of a mixture's task may leave in a reward."""


class Bounds(Section):
    """The settings of ``env.curriculum``."""

    low: float = setting(0.1, "pass rate below which a row is too hard", ge=0)
    high: float = setting(0.9, "pass rate above which a row is too easy", le=1)
    rest: int = setting(3, "epochs in which such a row is left out, before it is tried again", ge=1)
    passing: float | None = setting(
        None, "reward from which on a response passes; null: where the task judges it right"
    )


def read_bounds(given: Mapping[str, Any]) -> Bounds | None:
    """The settings of ``env.curriculum``; None where there are none, and every row is drawn.

    Raises:
        ValueError: there is no such setting, or a value makes no sense.
    """
    if not given:
        return None
    bounds = read_section(Bounds, given, "env.curriculum")
    if bounds.low >= bounds.high:
        raise ValueError(f"env.curriculum: low={bounds.low} must be less than high={bounds.high}")
    return bounds


class Curriculum:
    """The pass rates of the rows that this run has seen, and which rows they keep.

    Groups that were seen earlier weigh half as much with each one that follows, as the policy changes. A row that was
    not seen yet is kept, and one out of bounds is tried again when it has rested.

    Raises:
        ValueError: the task does not say which responses are right, and no reward is named as passing.

    >>> from grpo_rl.envs.gsm8k import GSM8K
    >>> curriculum = Curriculum(Bounds(low=0.1, high=0.9, rest=2), GSM8K([]))
    >>> right, wrong = ({"correctness": r, "reasoning_format": 0.0, "answer_format": 0.0} for r in (2.0, 0.0))
    >>> curriculum.note(7, [Reward(right)] * 4, epoch=0)
    >>> [curriculum.keeps(7, epoch) for epoch in (1, 2, 3)], curriculum.keeps(8, 1)
    ([False, False, True], True)
    >>> curriculum.note(7, [Reward(wrong)] * 4, epoch=3); curriculum.rate(7)  # (4 / 2 + 0) of (4 / 2 + 4)
    0.333...
    """

    def __init__(self, bounds: Bounds, task: Task) -> None:
        if bounds.passing is None and not task.tells_right:
            raise ValueError(f"{type(task).__name__} does not say what is right; set env.curriculum.passing")
        self._bounds, self._task = bounds, task
        self._seen: dict[int, tuple[float, float, int]] = {}
        self.passed_over = 0
        """The number of times that a row was left out so far."""
        self.whole_epochs = 0
        """Epochs in which every row was drawn, as the one before had none within bounds."""

    def note(self, row: int, results: Sequence[object], epoch: int) -> None:
        """Counts a group's responses to a row; those without a reward or verdict are ignored."""
        verdicts = [self._passes(result) for result in results if isinstance(result, Reward)]
        known = [verdict for verdict in verdicts if verdict is not None]
        if known:
            passed, judged, _ = self._seen.get(row, (0.0, 0.0, 0))
            self._seen[row] = (passed / 2 + sum(known), judged / 2 + len(known), epoch)

    def rate(self, row: int) -> float:
        """The pass rate of a row that was seen."""
        passed, judged, _ = self._seen[row]
        return passed / judged

    def keeps(self, row: int, epoch: int) -> bool:
        """True if a row is drawn in an epoch."""
        if row not in self._seen or self._bounds.low <= self.rate(row) <= self._bounds.high:
            return True
        return epoch - self._seen[row][2] > self._bounds.rest

    def metrics(self) -> dict[str, float]:
        """Counts of the rows that were seen, and of what was left out."""
        # A copy in one step: an asynchronous collection may note a group meanwhile, in another thread.
        rates = [passed / judged for passed, judged, _ in list(self._seen.values())]
        easy, hard = (sum(rate > self._bounds.high for rate in rates), sum(rate < self._bounds.low for rate in rates))
        return {
            "curriculum/in_bounds": len(rates) - easy - hard,
            "curriculum/too_easy": easy,
            "curriculum/too_hard": hard,
            "curriculum/passed_over": self.passed_over,
            "curriculum/whole_epochs": self.whole_epochs,
        }

    def state(self) -> dict[str, Any]:
        """The counts of the rows that were seen, as JSON-able numbers."""
        seen = [[row, *counts] for row, counts in list(self._seen.items())]
        return {"seen": seen, "passed_over": self.passed_over, "whole_epochs": self.whole_epochs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`."""
        self._seen = {row: (passed, judged, epoch) for row, passed, judged, epoch in state["seen"]}
        self.passed_over, self.whole_epochs = state["passed_over"], state["whole_epochs"]

    def _passes(self, reward: Reward) -> bool | None:
        passing = self._bounds.passing
        if passing is None:
            return self._task.is_right(reward)
        return reward.total >= passing or math.isclose(reward.total, passing, rel_tol=ROUNDING)
