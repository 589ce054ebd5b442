"""History: the metrics of a run's first and last steps, and the statistics that advisories are judged by."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, median, stdev
from typing import Any

from grpo_rl.monitor.metrics import step_seconds

WINDOW = 10
"""Steps over which a metric is averaged before it is judged: the mean of ten scatters a third as much as one step."""
EARLY = 5
"""Steps after which what is extreme is judged: so many that a smoke run of three or four steps is never judged."""
Z = 2.0
"""Standard errors that a difference must exceed: 95 % of a normal distribution lie between them."""

Row = Mapping[str, float]


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
        self.steps: deque[int] = deque(maxlen=WINDOW)
        """The newest training steps."""
        self.best: Row = {}
        """The step at which the reward of the last ``WINDOW`` steps was highest, and their medians."""
        self.best_eval: Row = {}
        """The evaluation of the best reward, or the lowest loss, before the newest."""
        self.last_eval: Row = {}
        self._first: dict[str, list[float]] = defaultdict(list)
        self._last: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=2 * WINDOW))

    def add(self, row: Row) -> None:
        """Takes a line of metrics."""
        if "reward/mean" in row or "loss/sft" in row:  # a training step
            self.steps.append(int(row["step"]))
            for name, value in {**row, **_derived(row)}.items():
                if math.isfinite(value):
                    if len(self._first[name]) < WINDOW:
                        self._first[name].append(value)
                    self._last[name].append(value)
            if (reward := self.mean("reward/mean")) > self.best.get("reward/mean", -math.inf):
                names = "reward/std", "reward/zero_std_fraction", "grad_norm", "entropy"
                medians = {name: self.median(name) for name in names}
                self.best = {"step": row["step"], "reward/mean": reward, **medians}
        for name, better in (("eval/reward", max), ("eval/loss", min)):
            if math.isfinite(row.get(name, math.nan)):
                earlier = [found for found in (self.best_eval, self.last_eval) if found]
                self.best_eval = better(earlier, key=lambda found: found[name], default={})
                self.last_eval = {**row, "reward/then": self.mean("reward/mean")}

    def values(self, name: str, steps: int = WINDOW) -> list[float]:
        """The metric's values in the last steps; NaN alone where there are fewer."""
        found = list(self._last[name])[-steps:]
        return found if len(found) == steps else [math.nan]

    def mean(self, name: str, steps: int = WINDOW) -> float:
        """The mean over the last steps."""
        return fmean(self.values(name, steps))

    def median(self, name: str) -> float:
        """The median of the last ``WINDOW`` steps, where single values may be far off."""
        return median(self.values(name))

    def first(self, name: str) -> float:
        """The mean over the first ``WINDOW`` steps, once there are twice as many."""
        return fmean(self._first[name]) if len(self._last[name]) == 2 * WINDOW else math.nan

    def before(self, name: str) -> float:
        """The median of the ``WINDOW`` steps before the last."""
        return median(self.values(name, 2 * WINDOW)[:WINDOW])

    def rises(self, name: str) -> bool:
        """True if the metric is higher in the last steps than in those before, beyond chance."""
        values = self.values(name, 2 * WINDOW)
        return _above(values[:WINDOW], values[WINDOW:])

    def falls(self, name: str) -> bool:
        """True if the metric falls within the last steps, beyond chance: it is already getting better."""
        values = [-value for value in list(self._last[name])[-WINDOW:]]
        return _above(values[: len(values) // 2], values[len(values) // 2 :])

    def growth(self, counter: str) -> list[float]:
        """How much a counter of the whole run grew, in those of the last ``WINDOW`` steps in which it did."""
        values = list(self._last[counter])[-WINDOW - 1 :]
        return [now - was for was, now in zip(values, values[1:], strict=False) if now > was]


def _derived(row: Row) -> dict[str, float]:
    """Further values of a step: shares of its time and of the memory, and responses so far whose scorers failed."""
    found = {}
    if seconds := step_seconds(row):
        found = {f"share/{phase}": row.get(f"time/{phase}_s", math.nan) / seconds for phase in ("wait", "sample")}
    if row.get("memory/limit_gib"):
        found["share/memory"] = row["memory/peak_gib"] / row["memory/limit_gib"]
    if row.get("train/optimizer_steps") and "train/micro_batches" in row:
        found["share/micro_batches"] = row["train/micro_batches"] / row["train/optimizer_steps"]
    # A kind that has not occurred yet has no count.
    failed = [value for name, value in row.items() if name.startswith("failed/") and name != "failed/groups"]
    return found | {"sum/failed": sum(failed)}


def _above(before: Sequence[float], after: Sequence[float]) -> bool:
    if min(len(before), len(after)) < 2:
        return False
    error = math.hypot(*(stdev(values) / math.sqrt(len(values)) for values in (before, after)))
    return fmean(after) - fmean(before) > Z * error
