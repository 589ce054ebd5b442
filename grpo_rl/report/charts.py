"""The curves of one or several runs: which metrics are drawn together, and their values in columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo_rl.monitor.metrics import REWARD_STATISTICS, finite_mean
from grpo_rl.report.files import read_rows
from grpo_rl.report.roofline import LIMITED_PHASES

MAX_POINTS = 2000
"""A longer series is averaged in bins: no screen shows more, and a week's run must not make a 50 MB page."""
DIGITS = 5
"""Significant digits of a value: more are not seen in a chart, and are half of the page's size."""

LOSS = tuple(f"loss/{name}" for name in ("total", "objective", "kl", "entropy"))


@dataclass(frozen=True)
class Chart:
    """A chart: metrics that are drawn together, and what they show.

    Args:
        series: metric name -> label. Series that no run logged are left out.
        floor: the axis reaches down to at least here.
        markers: each point is a mark, for the few points of an evaluation.
    """

    group: str
    title: str
    series: Mapping[str, str]
    help: str = ""
    floor: float | None = None
    stacked: bool = False
    percent: bool = False
    markers: bool = False


def build(run_dir: Path) -> dict[str, Any] | None:
    """The curves of a run; None where it has logged nothing."""
    rows = read_rows(run_dir)
    return curves({run_dir.name: rows}) if rows else None


def curves(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Columns of each run, and the charts that show them; of several runs, one metric a chart, and a line a run."""
    columns = [columns_of(rows) | {"name": name} for name, rows in runs.items()]
    names = {metric: None for run in columns for metric in run["columns"]}
    stale = any(row.get("staleness/max", 0) > 0 for rows in runs.values() for row in rows)
    drawn = []
    for chart in charts(list(names), stale):
        series = {metric: label for metric, label in chart.series.items() if metric in names}
        if not series:
            continue
        fixed = {**vars(chart), "series": [[metric, label, 0] for metric, label in series.items()]}
        if len(columns) == 1:
            drawn.append(fixed)
            continue
        for metric, label in series.items():
            title = chart.title if len(series) == 1 else f"{chart.title}: {label}"
            lines = [[metric, run["name"], i] for i, run in enumerate(columns) if metric in run["columns"]]
            drawn.append({**fixed, "title": title, "series": lines, "stacked": False})
    return {"runs": columns, "charts": drawn}


def charts(names: Sequence[str], stale: bool) -> list[Chart]:
    """The charts of these metrics, in reading order; each metric that no chart knows comes in one at the end.

    Args:
        stale: some token was; in synchronous training every token is fresh, and a chart of zeros would take room.
    """
    known = list(_known(names))
    if not stale:
        known = [chart for chart in known if chart.title != "Staleness"]
    drawn = {name for chart in known for name in chart.series} | {"staleness/mean", "staleness/max"}
    others: dict[str, dict[str, str]] = {}
    for name in names:
        if name not in drawn:
            folder, _, last = name.rpartition("/")
            others.setdefault(folder or "Counters", {})[name] = last
    return known + [Chart("Everything else", folder, series) for folder, series in others.items()]


def _known(names: Sequence[str]) -> Iterator[Chart]:
    def below(prefix: str, leave_out: frozenset[str] = frozenset()) -> dict[str, str]:
        found = [name for name in names if name.startswith(prefix) and name[len(prefix) :] not in leave_out]
        return {name: name[len(prefix) :].removesuffix("_s") for name in found}

    group = "Reward"
    yield Chart(group, "Reward", {"reward/mean": "mean reward"}, "Of the responses sampled for training.")
    yield Chart(
        group, "Held-out reward", {"eval/reward": "held-out"}, "Of problems never trained on; greedy.", markers=True
    )
    parts = below("reward/", REWARD_STATISTICS | {"sampled_mean"})
    yield Chart(group, "Reward parts", parts, "What the reward is made of, as means over responses.")
    spread = {f"reward_distribution/total/p{p}": f"{p} % earn less" for p in (90, 50, 10)}
    spread["reward/std"] = "standard deviation"
    yield Chart(group, "Spread of the reward", spread, "Over the responses of a step.")
    yield Chart(group, "Measured beside the reward", below("measure/"), "What the task logs and does not pay for.")
    yield Chart(
        group, "Zero-variance groups", {"reward/zero_std_fraction": "of all groups"},
        "All responses of the group earn the same, and teach nothing.", 0, percent=True,
    )  # fmt: skip
    group = "Responses"
    lengths = {"response/mean_length": "mean", "response/max_length": "longest"}
    yield Chart(group, "Response length", lengths, "In tokens.", 0)
    odd = {"response/truncated_fraction": "truncated", "response/repetition": "repeated 4-grams"}
    yield Chart(
        group, "Cut-off and repetitive responses", odd, "At the length limit; said before in the same response.", 0,
        percent=True,
    )  # fmt: skip
    held_out = below("eval/", frozenset({"reward", "standard_error", "failed", "mean_length", "truncated_fraction"}))
    yield Chart(group, "Held-out parts", held_out, "Parts of the held-out reward.", markers=True)
    group = "Policy"
    yield Chart(group, "Entropy", {"entropy": "entropy"}, "Nats a token. Near zero the policy stopped exploring.", 0)
    divergences = {"kl/ref": "to the reference", "kl/sampler": "to the sampler"}
    yield Chart(group, "KL divergence", divergences, "Nats a token.", 0)
    clipped = {"clip/low_fraction": "below", "clip/high_fraction": "above"}
    yield Chart(
        group, "Clipped tokens", clipped, "Their ratio left the clip range; few where a batch is trained on once.", 0,
        percent=True,
    )  # fmt: skip
    yield Chart(
        group, "Gradient norm", {"grad_norm": "before clipping"}, "Spikes come before a run falls apart.", 0
    )  # fmt: skip
    yield Chart(
        group, "Loss", {name: name[5:] for name in LOSS},
        "Its value says little in policy gradients; its parts should stay in proportion.",
    )  # fmt: skip
    yield Chart(group, "Learning rate", {"lr": "learning rate"}, "As scheduled.", 0)
    group = "Sampler and trainer"
    mismatch = {"mismatch/mean": "mean", "mismatch/max": "largest"}
    help = "Log-probabilities on the same weights: small gaps are rounding."
    yield Chart(group, "Sampler against trainer", mismatch, help, 0)
    versions = {"staleness/mean": "mean", "staleness/max": "largest"}
    yield Chart(group, "Staleness", versions, "Versions between the weights that sampled a token and those trained.", 0)
    busiest = {"router/load_max_over_mean": "worst layer"}
    yield Chart(group, "Busiest expert", busiest, "Its tokens over the layer's mean.", 0)
    group = "Machine"
    rates = {"throughput/sample_tokens_per_s": "sampling", "throughput/train_tokens_per_s": "training"}
    yield Chart(group, "Throughput", rates, "Tokens per second.", 0)
    phases = below("time/", frozenset({"at_s"}))
    yield Chart(group, "Time of a step", phases, "Seconds per phase, stacked.", 0, stacked=True)
    roofline = {"limit_fraction": "whole step"} | {f"limit_fraction/{phase}": phase for phase in LIMITED_PHASES}
    yield Chart(
        group, "Share of the machine's roofline", roofline, "Time at the machine's measured best, over the time taken.",
        0, percent=True,
    )  # fmt: skip
    memory = {name: label.removesuffix("_gib").replace("_", " ") for name, label in below("memory/").items()}
    yield Chart(group, "Memory", memory, "GiB of the training process, at its peak.", 0)


def columns_of(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """A run's metrics as columns over its steps, with time and tokens of training so far, where every step has them.

    A metric that not every point has gives the points that it has as ``at``. A value that is not finite is None.

    >>> columns_of([{"step": 0, "eval/reward": 0.5}, {"step": 1, "lr": 0.1234567}, {"step": 2, "lr": float("inf")}])
    ... # doctest: +NORMALIZE_WHITESPACE
    {'step': [0, 1, 2], 'time': None, 'tokens': None,
     'columns': {'eval/reward': {'at': [0], 'values': [0.5]}, 'lr': {'at': [1, 2], 'values': [0.12346, None]}}}
    """
    merged: dict[float, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    points = [merged[step] for step in sorted(merged)]
    seconds, tokens = [_step_s(point) for point in points], [_trained_tokens(point) for point in points]
    bins = [
        points[i : i + size] for size in [math.ceil(len(points) / MAX_POINTS) or 1] for i in range(0, len(points), size)
    ]
    last = [min(i + len(bins[0]), len(points)) - 1 for i in range(0, len(points), len(bins[0]))] if bins else []
    names = {name: None for point in points for name in point if name != "step"}
    columns = {}
    for name in names:
        found = [(i, [point[name] for point in bin if name in point]) for i, bin in enumerate(bins)]
        found = [(i, values) for i, values in found if values]
        values = [_digits(values[0] if len(values) == 1 else finite_mean(values)) for _, values in found]
        columns[name] = ({} if len(found) == len(bins) else {"at": [i for i, _ in found]}) | {"values": values}
    # A step 0, an evaluation before training, has spent neither.
    return {
        "step": [int(points[i]["step"]) for i in last],
        "time": _sums(points, seconds, last),
        "tokens": _sums(points, tokens, last),
        "columns": columns,
    }


def _sums(points: Sequence[Mapping[str, float]], parts: Sequence[float | None], last: Sequence[int]) -> list | None:
    steps = [part for point, part in zip(points, parts, strict=True) if point["step"] > 0]
    if not steps or any(part is None or not math.isfinite(part) for part in steps):
        return None
    sums = list(accumulate(part or 0.0 for part in parts))
    return [round(sums[i], 1) for i in last]


def _step_s(point: Mapping[str, float]) -> float | None:
    phases = [value for name, value in point.items() if name.startswith("time/") and name != "time/at_s"]
    return sum(phases) if phases else None


def _trained_tokens(point: Mapping[str, float]) -> float | None:
    if "throughput/train_tokens_per_s" not in point or "time/train_s" not in point:
        return None
    return point["throughput/train_tokens_per_s"] * point["time/train_s"]


def _digits(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
