"""History: the metrics of a run's first and last steps, and the statistics that its conditions are judged by."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from grpo_rl.monitor.step_phases import step_seconds

WINDOW = 10
"""Steps over which a metric is averaged before it is judged: the mean of ten scatters a third as much as one step."""
EARLY = 5
"""Steps after which what is extreme is judged: five of a run's steps are the least in which a trend can be told from
noise, and so many that a smoke run of three or four steps is never judged."""
Z = 2.0
"""Standard errors of an interval's ends: 95 % of a normal distribution lie between them."""
FEW_GROUPS = 20
"""Groups of the least sample of which a share is judged: of 20, all of a kind, the interval begins at 0.83."""

TIME, FAILED = "sum/time", "sum/failed"
"""Metrics that a history adds: seconds of a step, and responses of the whole run whose scorers failed."""

Row = Mapping[str, float]
Facts = Mapping[str, Any]
Point = tuple[int, float]


@dataclass(frozen=True)
class Finding:
    """A condition that holds now: its numbers, the first and last of the recent steps that show it, and the remedy."""

    seen: str
    setting: str
    first: int
    last: int


Rule = Callable[["History", Facts], Finding | None]


@dataclass
class Series:
    """A metric's first and last values, with their steps; steps that lack it, or have no finite value, are left out."""

    first: list[Point] = field(default_factory=list)
    recent: deque[Point] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))

    def add(self, step: int, value: float) -> None:
        """Appends a value."""
        if len(self.first) < WINDOW:
            self.first.append((step, value))
        self.recent.append((step, value))


class History:
    """The metrics of a run so far, as much of them as conditions ask for: its size does not grow with the run."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}
        self.row: Row = {}
        """The newest line of a training step."""
        self.evaluations: list[Row] = []
        """Lines of evaluations: the best before the newest, and the newest."""
        self.held_out_losses: list[Point] = []
        """The loss of held-out demonstrations: the lowest before the newest, and the newest."""
        self.paid = False
        """This is True once a reward was not 0."""
        self.alike: tuple[int, int, list[float]] = (0, 0, [])
        """Since when all responses to all prompts earn the same, for how many steps, and the shares of zero-variance
        groups in the two steps before; no steps where rewards differ."""
        self._steps: deque[Row] = deque(maxlen=2 * WINDOW)
        self._count = 0
        self._best: list[Row] = []

    def add(self, row: Row) -> None:
        """Takes a line of metrics."""
        if "reward/mean" in row:
            if row.get("reward/std", 1.0) or row.get("reward/zero_std_fraction") != 1:
                self.alike = (0, 0, [])
            else:
                since, steps, before = self.alike
                self.alike = (
                    (since, steps + 1, before)
                    if steps
                    else (int(row["step"]), 1, self.values("reward/zero_std_fraction", 2))
                )
            self._steps.append(row)
            self._count += 1
            self.paid |= bool(row["reward/mean"] or row.get("reward/std", 0.0))
            if self._count > WINDOW:
                steps = list(self._steps)[:-WINDOW]
                self._best = max(self._best, steps[-EARLY:], key=mean_reward)
        if is_training_step(row):
            row = {**row, TIME: step_seconds(row) or 0.0, FAILED: _sum(row, "failed/") - row.get("failed/groups", 0)}
            self.row = row
            for name, value in row.items():
                if name != "step" and math.isfinite(value):
                    self._series.setdefault(name, Series()).add(int(row["step"]), value)
        if "eval/reward" in row:
            best = max(self.evaluations, key=lambda one: one["eval/reward"], default=None)
            now = {**row, "reward/then": mean(self.values("reward/mean"))}
            self.evaluations = [best, now] if best else [now]
        if math.isfinite(loss := row.get("eval/loss", math.nan)):
            lowest = min(self.held_out_losses, key=lambda point: point[1], default=None)
            self.held_out_losses = [*([lowest] if lowest else []), (int(row["step"]), loss)]

    def best_and_last(self) -> tuple[list[Row], list[Row]]:
        """The ``EARLY`` steps in a row of the highest reward, and the newest ones; empty while there are too few.

        The newest are ``WINDOW`` steps; ``EARLY`` while a run is younger than twice that.
        """
        if self._count >= 2 * WINDOW:
            return self._best, list(self._steps)[-WINDOW:]
        steps = list(self._steps)
        earlier, newest = steps[:-EARLY], steps[-EARLY:]
        blocks = [earlier[max(end - EARLY, 0) : end] for end in range(1, len(earlier) + 1)]
        return (max(blocks, key=mean_reward), newest) if blocks else ([], [])

    def last(self, name: str, steps: int = WINDOW) -> list[Point]:
        """The metric's newest values, at most so many, with their steps."""
        series = self._series.get(name)
        return list(series.recent)[-steps:] if series else []

    def values(self, name: str, steps: int = WINDOW, first: bool = False) -> list[float]:
        """The metric's newest values, at most so many, or its first ones."""
        series = self._series.get(name)
        return [value for _, value in (series.first[:steps] if series and first else self.last(name, steps))]

    def ends(self, name: str, steps: int = WINDOW) -> tuple[list[float], list[float]]:
        """The metric's first and its last values, so many of each; empty while they would overlap."""
        series = self._series.get(name)
        if series is None or len(series.recent) < 2 * steps:
            return [], []
        return [value for _, value in series.first[:steps]], [value for _, value in list(series.recent)[-steps:]]

    def halves(self, name: str) -> tuple[list[float], list[float]]:
        """The values of the last ``WINDOW`` steps but one, and those of the last; empty while there are too few."""
        values = self.values(name, 2 * WINDOW)
        return (values[:WINDOW], values[WINDOW:]) if len(values) == 2 * WINDOW else ([], [])


def is_training_step(row: Row) -> bool:
    """Tells whether a line of metrics is of a training step: of GRPO or of SFT.

    >>> is_training_step({"step": 0, "eval/loss": 2.0}), is_training_step({"step": 1, "loss/sft": 2.0})
    (False, True)
    """
    return "reward/mean" in row or "loss/sft" in row


def mean_reward(rows: Sequence[Row]) -> float:
    """The mean reward of these steps; minus infinity of none."""
    return fmean(row["reward/mean"] for row in rows) if rows else -math.inf


def _sum(row: Row, kind: str) -> float:
    return sum(row[name] for name in row if name.startswith(kind))


def groups_of(facts: Facts) -> int:
    """Groups of a step."""
    return max(int(facts.get("env.num_envs") or 1), 1)


def in_float32(facts: Facts) -> bool:
    """Tells whether the weights are float32 already."""
    return facts.get("train_model.dtype") == "float32"


def share_steps(facts: Facts, least: int) -> int:
    """Steps, ``least`` or more, that have groups enough for a share to be judged."""
    return min(max(least, math.ceil(FEW_GROUPS / groups_of(facts))), 2 * WINDOW)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of a share that was seen in so many cases.

    Shares of responses are judged with the number of groups as the count, as the responses to one prompt resemble each
    other: the interval is too wide rather than too narrow.

    >>> [round(end, 2) for end in share_interval(1.0, 20)], [round(end, 2) for end in share_interval(0.6, 160)]
    ([0.83, 1.0], [0.52, 0.67])
    """
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    middle = share + Z * Z / (2 * count)
    return (middle - spread) / (1 + Z * Z / count), (middle + spread) / (1 + Z * Z / count)


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean, from the scatter of the values; infinite for a single one."""
    if len(values) < 2:
        return math.inf
    centre = fmean(values)
    # By hand, as `statistics.stdev` adds fractions, which is slow.
    return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1) / len(values))


def rises(before: Sequence[float], after: Sequence[float], errors: float = Z) -> bool:
    """Tells whether the mean is higher after than before, by more than so many standard errors of the difference.

    >>> rises([0.1, 0.2, 0.1], [0.5, 0.4, 0.5]), rises([0.1, 0.9, 0.2], [0.5, 0.4, 0.5]), rises([0.0] * 3, [0.0] * 3)
    (True, False, False)
    """
    difference = fmean(after) - fmean(before)
    return difference > errors * math.hypot(standard_error(before), standard_error(after))


def falling(values: Sequence[float]) -> bool:
    """Tells whether the second half of the values lies below the first: what is seen is already getting better."""
    half = len(values) // 2
    return rises([-v for v in values[:half]], [-v for v in values[half:]])


def span(points: Sequence[Point], shows: Callable[[float], bool]) -> tuple[int, int]:
    """The steps, first and last, of the newest stretch that shows a condition; the whole window if no value does.

    A stretch has no gap of two values.

    >>> span([(1, 0.9), (2, 0.1), (3, 0.1), (4, 0.9), (5, 0.1), (6, 0.8), (7, 0.1)], lambda value: value > 0.5)
    (4, 6)
    """
    shown = [index for index, (_, value) in enumerate(points) if shows(value)]
    if not shown:
        return points[0][0], points[-1][0]
    first = shown[-1]
    for index in reversed(shown):
        if first - index > 2:
            break
        first = index
    return points[first][0], points[shown[-1]][0]


def middle(values: Sequence[float]) -> float:
    """The median; NaN of nothing, which is neither above nor below any bound."""
    return median(values) if values else math.nan


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return fmean(values) if values else math.nan


def change(facts: Facts, name: str, value: object) -> str:
    """The value to try for a setting, and the one it has now.

    >>> change({"optimizer.lr": 0.01}, "optimizer.lr", 0.001), change({}, "optimizer.lr", "lower")
    ('optimizer.lr=0.001 (now 0.01)', 'a lower optimizer.lr')
    """
    now = facts.get(name)
    if isinstance(value, str) and value in ("lower", "higher"):
        return f"a {value} {name}" + (f" (now {_text(now)})" if name in facts else "")
    return f"{name}={_text(value)}" + (f" (now {_text(now)})" if name in facts else "")


def times(facts: Facts, name: str, factor: float) -> str:
    """The number to try for a setting: a multiple of its value now, or just more or less where that isn't known.

    >>> times({"env.repeats": 8}, "env.repeats", 2), times({}, "env.repeats", 2)
    ('env.repeats=16 (now 8)', 'a higher env.repeats')
    """
    now = facts.get(name)
    if not isinstance(now, int | float) or isinstance(now, bool) or not now:
        return change(facts, name, "higher" if factor > 1 else "lower")
    return change(facts, name, round(now * factor) if isinstance(now, int) and now * factor >= 1 else now * factor)


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)
