"""Curriculum: rows are drawn or left out by their pass rates in this run, and by how often they had no variance."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_rl.envs.task import Reward, Task
from grpo_rl.section import Section, read_section, setting

ROUNDING = 1e-9
"""Relative difference that the scale of a mixture's task may leave in a reward."""
WINDOW = 32
"""Groups between two adaptations of ``explore``."""
EXPLORE_STEP = 0.01
"""Change of ``explore`` in an adaptation, as in GRESO's paper."""
SHARES = {"easy": 1 / 3, "hard": 2 / 3, "unknown": 1.0}
"""Kinds of zero-variance groups, by what the task judges right, and their shares of ``zero_variance``."""


class Bounds(Section):
    """The settings of ``env.curriculum``."""

    low: float = setting(0.1, "pass rate below which a row is too hard", ge=0)
    high: float = setting(0.9, "pass rate above which a row is too easy", le=1)
    rest: int = setting(3, "epochs in which such a row is left out, before it is tried again", ge=1)
    passing: float | None = setting(None, "reward from which a response passes; null: where the task judges it right")
    explore: float | None = setting(
        None,
        "GRESO: a row whose last z groups had zero variance is drawn with this probability to the power of z, which "
        "adapts; low and high are then 0 and 1 where they are not given; null: as any other",
        gt=0,
        le=1,
    )
    zero_variance: float = setting(
        0.25, "for explore: share of zero-variance groups that it adapts to; a third of these are easy", gt=0, le=1
    )


def read_bounds(given: Mapping[str, Any]) -> Bounds | None:
    """The settings of ``env.curriculum``; None where there are none, and every row is drawn.

    Raises:
        ValueError: there is no such setting, or a value makes no sense.
    """
    if not given:
        return None
    bounds = read_section(Bounds, ({"low": 0.0, "high": 1.0} if given.get("explore") else {}) | given, "env.curriculum")
    if bounds.low >= bounds.high:
        raise ValueError(f"env.curriculum: low={bounds.low} must be less than high={bounds.high}")
    return bounds


class Curriculum:
    """The pass rates of the rows that this run has seen, and which rows they keep.

    Groups that were seen earlier weigh half as much with each one that follows, as the policy changes. A row that was
    not seen yet is kept, and one out of bounds is tried again when it has rested.

    With ``explore`` a row is drawn less often the more of its last groups had zero variance: GRESO,
    https://arxiv.org/abs/2506.02177, algorithm 1. The draw does not depend on how a row would be rewarded now, so that
    the rewards of drawn groups are unbiased.

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
        if (bounds.low > 0 or bounds.high < 1) and bounds.passing is None and not task.tells_right:
            raise ValueError(f"{type(task).__name__} does not say what is right; set env.curriculum.passing")
        self._bounds, self._task = bounds, task
        self._seen: dict[int, tuple[float, float, int]] = {}
        self._in_a_row: dict[int, tuple[int, str]] = {}
        """Zero-variance groups of a row since one had variance, and the kind of the last."""
        self._explore = dict.fromkeys(SHARES, bounds.explore or 1.0)
        self._window: list[str] = []
        """The kinds of the last groups; empty for one with variance."""
        self.passed_over = 0
        """The number of times that a row was left out so far."""
        self.whole_epochs = 0
        """Epochs in which every row was drawn, as the one before had none within bounds."""

    def note(self, row: int, results: Sequence[object], epoch: int) -> None:
        """Counts a group's responses to a row; those without a reward or verdict are ignored."""
        verdicts = [self._passes(result) for result in results if isinstance(result, Reward)]
        known = [verdict for verdict in verdicts if verdict is not None]
        if self._bounds.explore is not None and len(verdicts) > 1:
            totals = [result.total for result in results if isinstance(result, Reward)]
            same = math.isclose(min(totals), max(totals), rel_tol=ROUNDING, abs_tol=ROUNDING)
            self._note_variance(row, ("unknown" if not known else "easy" if all(known) else "hard") if same else "")
        if known:
            passed, judged, _ = self._seen.get(row, (0.0, 0.0, 0))
            self._seen[row] = (passed / 2 + sum(known), judged / 2 + len(known), epoch)

    def _note_variance(self, row: int, kind: str) -> None:
        if kind:
            self._in_a_row[row] = self._in_a_row.get(row, (0, kind))[0] + 1, kind
        else:
            self._in_a_row.pop(row, None)
        self._window.append(kind)
        if len(self._window) == WINDOW:
            for kind, share in SHARES.items():
                too_many = self._window.count(kind) >= share * self._bounds.zero_variance * WINDOW
                moved = self._explore[kind] + (-EXPLORE_STEP if too_many else EXPLORE_STEP)
                self._explore[kind] = min(max(moved, EXPLORE_STEP), 1.0)
            self._window = []

    def rate(self, row: int) -> float:
        """The pass rate of a row that was seen."""
        passed, judged, _ = self._seen[row]
        return passed / judged

    def keeps(self, row: int, epoch: int, seed: int = 0) -> bool:
        """True if a row is drawn in an epoch; the seed decides what is left to chance, so that a resumed run agrees."""
        times, kind = self._in_a_row.get(row, (0, "")) if self._bounds.explore is not None else (0, "")
        if times and random.Random(f"{seed}/{epoch}/{row}").random() >= self._explore[kind] ** times:
            return False
        if row not in self._seen or self._bounds.low <= self.rate(row) <= self._bounds.high:
            return True
        return epoch - self._seen[row][2] > self._bounds.rest

    def metrics(self) -> dict[str, float]:
        """Counts of the rows that were seen, and of what was left out."""
        # A copy in one step: an asynchronous collection may note a group meanwhile, in another thread.
        rates = [passed / judged for passed, judged, _ in list(self._seen.values())]
        easy, hard = (sum(rate > self._bounds.high for rate in rates), sum(rate < self._bounds.low for rate in rates))
        judged = self._task.tells_right or self._bounds.passing is not None
        kinds = ("easy", "hard") if judged else ("unknown",)
        explored = {f"curriculum/explore_{kind}": self._explore[kind] for kind in kinds}
        return (explored if self._bounds.explore is not None else {}) | {
            "curriculum/in_bounds": len(rates) - easy - hard,
            "curriculum/too_easy": easy,
            "curriculum/too_hard": hard,
            "curriculum/passed_over": self.passed_over,
            "curriculum/whole_epochs": self.whole_epochs,
        }

    def state(self) -> dict[str, Any]:
        """The counts of the rows that were seen, as JSON-able numbers."""
        seen = [[row, *counts] for row, counts in list(self._seen.items())]
        own = {"explore": dict(self._explore), "in_a_row": [*self._in_a_row.items()], "window": [*self._window]}
        return own | {"seen": seen, "passed_over": self.passed_over, "whole_epochs": self.whole_epochs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`."""
        self._seen = {row: (passed, judged, epoch) for row, passed, judged, epoch in state["seen"]}
        self.passed_over, self.whole_epochs = state["passed_over"], state["whole_epochs"]
        self._explore |= state.get("explore", {})
        self._window = [*state.get("window", ())]
        self._in_a_row = {row: tuple(times) for row, times in state.get("in_a_row", ())}

    def _passes(self, reward: Reward) -> bool | None:
        passing = self._bounds.passing
        if passing is None:
            return self._task.is_right(reward)
        return reward.total >= passing or math.isclose(reward.total, passing, rel_tol=ROUNDING)
