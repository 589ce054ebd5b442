"""History: the metrics of a run's first and last steps, and the statistics that advisories are judged by."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from grpo_rl.monitor.step_phases import step_seconds

WINDOW = 10
"""Steps over which a metric is averaged before it is judged: the mean of ten scatters a third as much as one step."""
EARLY = 5
"""Steps after which what is extreme is judged: so many that a smoke run of three or four steps is never judged."""
Z = 2.0
"""Standard errors of an interval's ends: 95 % of a normal distribution lie between them."""
FEW_GROUPS = 20
"""Groups of the least sample of which a share is judged: of 20, all of a kind, the interval begins at 0.83."""

Row = Mapping[str, float]
Point = tuple[int, float]


class History:
    """The metrics of a run so far, as much of them as advisories need: its size does not grow with the run.

    A statistic of too few values is NaN, which is neither above nor below any bound.

    Args:
        facts: the run's settings by their dotted names.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.groups = max(int(facts.get("env.num_envs") or 1), 1)
        self.responses = self.groups * int(facts.get("env.repeats") or 8)
        self.row: Row = {}
        """The newest line of a training step."""
        self.evaluations: list[Row] = []
        """Lines of evaluations: that of the best reward, or the lowest loss, before the newest, and the newest."""
        self.best: list[Row] = []
        """The ``EARLY`` steps in a row of the highest reward, before the last ``WINDOW``."""
        self.alike: tuple[int, float] | None = None
        """The step since which all responses to all prompts earn the same, and the most zero-variance groups just
        before; None where rewards differ."""
        self.rows: deque[Row] = deque(maxlen=2 * WINDOW)
        self._first: dict[str, list[Point]] = {}
        self._last: dict[str, deque[Point]] = {}

    def add(self, row: Row) -> None:
        """Takes a line of metrics."""
        if "reward/mean" in row:
            if row.get("reward/std", 1.0) or row.get("reward/zero_std_fraction") != 1:
                self.alike = None
            elif not self.alike:
                before = [value for _, value in self.last("reward/zero_std_fraction", 2)]
                self.alike = int(row["step"]), max(before, default=1.0)
        if is_training_step(row):
            self.row = row
            self.rows.append(row)
            for name, value in {**row, **_derived(row)}.items():
                if name != "step" and math.isfinite(value):
                    first = self._first.setdefault(name, [])
                    if len(first) < WINDOW:
                        first.append((int(row["step"]), value))
                    self._last.setdefault(name, deque(maxlen=2 * WINDOW)).append((int(row["step"]), value))
            if "reward/mean" in row and len(self.rows) == 2 * WINDOW:
                self.best = max(self.best, list(self.rows)[EARLY:WINDOW], key=lambda rows: _mean(rows, "reward/mean"))
        for name, better in (("eval/reward", max), ("eval/loss", min)):
            if math.isfinite(row.get(name, math.nan)):
                now = {**row, "reward/then": self.mean("reward/mean")}
                self.evaluations = [
                    *([better(self.evaluations, key=lambda r: r[name])] if self.evaluations else []),
                    now,
                ]

    def last(self, name: str, steps: int = 2 * WINDOW) -> list[Point]:
        """The metric's newest values, at most so many, with their steps."""
        return list(self._last.get(name, ()))[-steps:]

    def values(self, name: str, steps: int = WINDOW) -> list[float]:
        """The metric's values in the last steps; NaN alone where there are fewer."""
        found = [value for _, value in self.last(name, steps)]
        return found if len(found) == steps else [math.nan]

    def mean(self, name: str, steps: int = WINDOW) -> float:
        """The mean over the last steps."""
        return fmean(self.values(name, steps))

    def median(self, name: str, steps: int = WINDOW) -> float:
        """The median of the last steps, where single values may be far off."""
        return median(self.values(name, steps))

    def first(self, name: str) -> float:
        """The mean over the first ``WINDOW`` steps, once there are twice as many."""
        return fmean(value for _, value in self._first[name]) if len(self.last(name)) == 2 * WINDOW else math.nan

    def before(self, name: str) -> float:
        """The median of the ``WINDOW`` steps before the last."""
        return median(self.values(name, 2 * WINDOW)[:WINDOW])

    def largest(self, name: str, steps: int = WINDOW) -> float:
        """The largest absolute value in the last steps."""
        return max(map(abs, self.values(name, steps)))

    def rises(self, name: str) -> bool:
        """True if the metric is higher in the last steps than in those before, beyond chance."""
        values = self.values(name, 2 * WINDOW)
        return _above(values[:WINDOW], values[WINDOW:])

    def rose(self, name: str) -> bool:
        """True if the metric is higher in the last steps than in the first, beyond chance."""
        return _above([value for _, value in self._first.get(name, ())], self.values(name))

    def falls(self, name: str) -> bool:
        """True if the metric falls within the last steps, beyond chance: what is seen is already getting better."""
        values = [-value for _, value in self.last(name, WINDOW)]
        return _above(values[: len(values) // 2], values[len(values) // 2 :])

    def surely(self, share: str, least: int = WINDOW) -> float:
        """The lower end of a share's interval over the last steps, ``least`` or as many as have groups enough.

        Groups are counted, as the responses to one prompt resemble each other: the interval is rather too wide.
        """
        steps = min(max(least, math.ceil(FEW_GROUPS / self.groups)), 2 * WINDOW)
        return lower_end(min(self.mean(share, steps), 1.0), steps * self.groups)

    @property
    def halfway(self) -> float:
        """The reward halfway between its best and that of the last steps."""
        return (_mean(self.best, "reward/mean") + self.mean("reward/mean")) / 2

    def growth(self, counter: str) -> list[Point]:
        """The last ``WINDOW`` steps in which a counter of the whole run grew, and by how much."""
        points = self.last(counter, WINDOW + 1)
        return [(now[0], now[1] - was[1]) for was, now in zip(points, points[1:], strict=False) if now[1] > was[1]]


def is_training_step(row: Row) -> bool:
    """True if a line of metrics is of a training step: of GRPO or of SFT.

    >>> is_training_step({"step": 0, "eval/loss": 2.0}), is_training_step({"step": 1, "loss/sft": 2.0})
    (False, True)
    """
    return "reward/mean" in row or "loss/sft" in row


def _derived(row: Row) -> dict[str, float]:
    """Further values of a step: shares of its time and of the memory, and responses so far whose scorers failed."""
    seconds, found = step_seconds(row), {}
    if seconds:
        found = {
            f"share/{phase}": row[f"time/{phase}_s"] / seconds
            for phase in ("wait", "sample")
            if f"time/{phase}_s" in row
        }
    if row.get("memory/limit_gib"):
        found["share/memory"] = row["memory/peak_gib"] / row["memory/limit_gib"]
    if row.get("train/optimizer_steps") and "train/micro_batches" in row:
        found["share/micro_batches"] = row["train/micro_batches"] / row["train/optimizer_steps"]
    if "reward/mean" in row:
        found["share/zero"] = float(row["reward/mean"] == row.get("reward/std", 0.0) == 0)
    # A kind that has not occurred yet has no count.
    failed = [value for name, value in row.items() if name.startswith("failed/") and name != "failed/groups"]
    return found | {"sum/failed": sum(failed)}


def lower_end(share: float, count: int) -> float:
    """The lower end of Wilson's interval of a share that was seen in so many cases.

    >>> round(lower_end(1.0, 20), 2), round(lower_end(0.6, 160), 2)
    (0.83, 0.52)
    """
    spread = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return (share + Z * Z / (2 * count) - spread) / (1 + Z * Z / count)


def _above(before: Sequence[float], after: Sequence[float]) -> bool:
    if min(len(before), len(after)) < 2:
        return False
    error = math.hypot(*(stdev(values) / math.sqrt(len(values)) for values in (before, after)))
    return fmean(after) - fmean(before) > Z * error


def _mean(rows: Sequence[Row], name: str) -> float:
    return fmean(row[name] for row in rows) if rows else -math.inf


def fall_of_reward(history: History) -> str | None:
    """The numbers of a reward that fell far below its best while the weights came off course; None: it did not.

    The fall is four standard errors, as the best of many steps are chosen for being high, and half of a response's
    standard deviation. That the weights came off course shows in the gradient, entropy, effective sample size or
    variance inside groups.
    """
    best, last = history.best, list(history.rows)[-WINDOW:]
    if not best:
        return None
    high, low = (_mean(rows, "reward/mean") for rows in (best, last))
    spread = max(fmean(row.get("reward/std", 0.0) for row in rows) for rows in (best, last))
    errors = [
        row.get("reward/std", 0.0) ** 2 / history.groups / len(rows) ** 2 for rows in (best, last) for row in rows
    ]
    if high - low <= max(4 * math.sqrt(math.fsum(errors)), 0.5 * spread, 0.0):
        return None
    if any(row["reward/mean"] >= (high + low) / 2 for row in last):
        return None

    def both(name: str) -> list[float]:
        found = ([row[name] for row in rows if math.isfinite(row.get(name, math.nan))] for rows in (best, last))
        return [median(values) if values else math.nan for values in found]

    norm, entropy, alike = both("grad_norm"), both("entropy"), both("reward/zero_std_fraction")
    signs = {
        f"the gradient's norm went from {norm[0]:.2g} to {norm[1]:.2g}": norm[1] > 3 * norm[0],
        f"entropy went from {entropy[0]:.2g} to {entropy[1]:.2g} nats a token": max(entropy) > 3 * min(entropy),
        "more than half of the effective sample size is lost": both("ess")[1] < 0.5,
        f"{alike[1]:.0%} of the groups have no variance": alike[0] < 0.5 and alike[1] >= 0.8,
    }
    sign = next((text for text, is_seen in signs.items() if is_seen), None)
    return sign and f"the reward fell from {high:.3g} (step {int(best[-1]['step'])}) to {low:.3g}, and {sign}"


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
