"""The curves of one or several runs: which metrics are drawn together, and their values in columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo_rl.monitor.metrics import finite_mean, first_and_last, step_seconds
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
    """The charts of these metrics, in reading order; each metric without a chart gets one at the end.

    Unless some token was ``stale`` there is no chart of that: in synchronous training it would be one of zeros.
    """
    known = [chart for chart in known_charts(names) if stale or chart.title != "Staleness"]
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
    bins = binned(points)
    last = [end - 1 for end in accumulate(map(len, bins))]
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
    steps = [point for point in points if point["step"] > 0]
    untrained = [0.0] * (len(points) - len(steps))  # a step 0, an evaluation before training, has spent nothing
    seconds = _complete([step_seconds(step) for step in steps])
    trained = _complete([step.get("total/trained_tokens") for step in steps])
    time, tokens = [*untrained, *accumulate(seconds)], [*untrained, *trained]
    return {
        "step": [int(points[i]["step"]) for i in last],
        "time": [round(time[i], 1) for i in last] if seconds else None,
        "tokens": [round(tokens[i]) for i in last] if trained else None,
        "columns": columns,
    }


def _complete(values: Sequence[float | None]) -> list[float]:
    """The values where each step has one; else none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return known if len(known) == len(values) else []


def _digits(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
