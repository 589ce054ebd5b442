"""The curves of one or several runs: which metrics are drawn together, and their values in columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo_rl.monitor.metrics import finite_mean, first_and_last
from grpo_rl.report.files import read_rows
from grpo_rl.report.known_charts import CLOCKS, Chart, known_charts
from grpo_rl.report.sample import binned

DIGITS = 5
"""Significant digits of a value: more are not seen in a chart, and are half of the page's size."""


def build(run_dir: Path) -> dict[str, Any] | None:
    """The curves of a run; None where it has logged nothing."""
    rows = read_rows(run_dir)
    return curves({run_dir.name: rows}) if rows else None


def curves(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Columns of each run, and the charts that show them; of several runs, one metric a chart, and a line a run.

    A series is a metric, its label, the number of its run, and that of its colour.
    """
    columns = [columns_of(rows) | {"name": name} for name, rows in runs.items()]
    names = {metric: None for run in columns for metric in run["columns"]}
    stale = any(row.get("staleness/max", 0) > 0 for rows in runs.values() for row in rows)
    drawn = []
    for chart in charts(list(names), stale):
        # A series keeps its colour whatever others there are.
        shown = [
            [metric, label, 0, colour] for colour, (metric, label) in enumerate(chart.series.items()) if metric in names
        ]
        if not shown:
            continue
        fixed = {**vars(chart), "series": shown}
        if len(columns) == 1:
            drawn.append(fixed)
            continue
        for metric, label, *_ in shown:
            title = chart.title if len(shown) == 1 else f"{chart.title}: {label}"
            lines = [[metric, run["name"], i, i] for i, run in enumerate(columns) if metric in run["columns"]]
            drawn.append({**fixed, "title": title, "series": lines, "stacked": False})
    return {"runs": columns, "charts": drawn}


def charts(names: Sequence[str], stale: bool) -> list[Chart]:
    """The charts of these metrics, in reading order; each metric that no chart knows comes in one at the end.

    Args:
        stale: some token was; in synchronous training every token is fresh, and a chart of zeros would take room.
    """
    known = list(known_charts(names))
    if not stale:
        known = [chart for chart in known if chart.title != "Staleness"]
    drawn = {name for chart in known for name in chart.series} | {"staleness/mean", "staleness/max"} | CLOCKS
    others: dict[str, dict[str, str]] = {}
    for name in names:
        if name not in drawn:
            folder, _, last = name.rpartition("/")
            others.setdefault(folder or "Counters", {})[name] = last
    return known + [Chart("Everything else", folder, series) for folder, series in others.items()]


def columns_of(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """A run's metrics as columns over its steps, with time and tokens of training so far, where every step has them.

    A metric that not every point has gives the points that it has as ``at``; one with several values gives the means of
    its first and its last ones as ``ends`` (`grpo_rl.monitor.metrics.first_and_last`). A value that is not finite is
    None.

    >>> columns_of([{"step": 0, "eval/reward": 0.5}, {"step": 1, "lr": 0.1234567}, {"step": 2, "lr": float("inf")}])
    ... # doctest: +NORMALIZE_WHITESPACE
    {'step': [0, 1, 2], 'time': None, 'tokens': None,
     'columns': {'eval/reward': {'at': [0], 'values': [0.5]},
                 'lr': {'at': [1, 2], 'values': [0.12346, None], 'ends': [0.12346, None]}}}
    """
    merged: dict[float, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    points = [merged[step] for step in sorted(merged)]
    seconds = [_step_s(point) for point in points]
    bins = binned(points)
    last = [min(i + len(bins[0]), len(points)) - 1 for i in range(0, len(points), len(bins[0]))] if bins else []
    names = {name: None for point in points for name in point if name not in {"step"} | CLOCKS}
    columns: dict[str, dict[str, Any]] = {}
    for name in names:
        found = [(i, [point[name] for point in bin if name in point]) for i, bin in enumerate(bins)]
        found = [(i, values) for i, values in found if values]
        values = [_digits(values[0] if len(values) == 1 else finite_mean(values)) for _, values in found]
        columns[name] = ({} if len(found) == len(bins) else {"at": [i for i, _ in found]}) | {"values": values}
        every = [point[name] for point in points if name in point]
        if len(every) > 1:
            columns[name]["ends"] = [_digits(end) for end in first_and_last(every)]
    # A step 0, an evaluation before training, has spent neither.
    return {
        "step": [int(points[i]["step"]) for i in last],
        "time": _sums(points, seconds, last),
        "tokens": _tokens(points, last),
        "columns": columns,
    }


def _sums(points: Sequence[Mapping[str, float]], parts: Sequence[float | None], last: Sequence[int]) -> list | None:
    steps = [part for point, part in zip(points, parts, strict=True) if point["step"] > 0]
    if not steps or any(part is None or not math.isfinite(part) for part in steps):
        return None
    sums = list(accumulate(part or 0.0 for part in parts))
    return [round(sums[i], 1) for i in last]


def _step_s(point: Mapping[str, float]) -> float | None:
    """The time of the step alone: neither when it ended nor the evaluation behind it."""
    phases = [
        value for name, value in point.items() if name.startswith("time/") and name not in CLOCKS | {"time/evaluate_s"}
    ]
    return sum(phases) if phases else None


def _tokens(points: Sequence[Mapping[str, float]], last: Sequence[int]) -> list | None:
    """The tokens trained on so far; None where a step did not count them."""
    steps = [point for point in points if point["step"] > 0]
    if not steps or any("total/trained_tokens" not in point for point in steps):
        return None
    return [round(points[i].get("total/trained_tokens", 0.0)) for i in last]


def _digits(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
