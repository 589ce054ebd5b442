"""Curves of a run as small inline SVG whose colours follow the page's light or dark theme."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from grpo_rl.monitor.metrics import REWARD_STATISTICS, finite_mean

MAX_POINTS = 400
"""A longer series is averaged in bins: no screen shows more, and a week's run must not make a 50 MB page."""

LIMITED_PHASES = ("sample", "score", "train", "sync")
"""Phases of a step for which a floor is known."""

LOSS = tuple(f"loss/{name}" for name in ("total", "objective", "kl", "entropy"))
MISMATCH = {"mismatch/mean": "mean", "mismatch/max": "largest"}
SMOOTH_FROM = 30
"""The number of points from which a rolling mean is drawn over the raw series."""

# Matplotlib writes literal colours; these stand for the page's CSS variables and are swapped after drawing.
_SERIES = [f"#fe010{i}" for i in range(6)]
_INK, _GRID = "#fe01f0", "#fe01f1"
_VARIABLES = {colour: f"var(--series-{i})" for i, colour in enumerate(_SERIES)} | {
    _INK: "var(--muted)",
    _GRID: "var(--line)",
}


@dataclass(frozen=True)
class Chart:
    """A chart: metrics that are drawn together, and what they show.

    Args:
        series: metric name -> label. Series that the run did not log are left out.
        floor: the axis reaches down to at least here.
        markers: each point is a mark, for the few points of an evaluation.
    """

    title: str
    series: Mapping[str, str]
    help: str
    floor: float | None = None
    stacked: bool = False
    percent: bool = False
    markers: bool = False


@dataclass(frozen=True)
class Curve:
    """One series in a chart's legend; ``ends`` are its means over the first and the last tenth of the points."""

    label: str
    colour: str
    ends: str


@dataclass(frozen=True)
class Drawing:
    """A chart drawn: the SVG element and its legend."""

    title: str
    help: str
    svg: str
    curves: list[Curve]


def charts(rows: Sequence[Mapping[str, float]]) -> list[Chart]:
    """The charts of a report over these metrics, in reading order; parts of the reward are taken from the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    parts = [name for name in names if name.startswith("reward/") and name[7:] not in REWARD_STATISTICS]
    phases = {name: name[5:].removesuffix("_s") for name in names if name.startswith("time/")}
    # In synchronous training every token is fresh, and a chart of zeros would only take room.
    stale = ["staleness/mean", "staleness/max"] if any(row.get("staleness/max", 0) > 0 for row in rows) else []
    spread = {f"reward_distribution/total/p{p}": f"{p} % earn less" for p in (90, 50, 10)}
    measures = [name for name in names if name.startswith("measure/")]
    odd = {"response/truncated_fraction": "truncated", "response/repetition": "repeated 4-grams"}
    rates = {"throughput/sample_tokens_per_s": "sampling", "throughput/train_tokens_per_s": "training"}
    clipped = {"clip/low_fraction": "below", "clip/high_fraction": "above"}
    roofline = {"limit_fraction": "whole step"} | {f"limit_fraction/{phase}": phase for phase in LIMITED_PHASES}

    def last(names: Sequence[str]) -> dict[str, str]:
        return {name: name.partition("/")[2] for name in names}

    def above_0(title: str, series: Mapping[str, str], help: str, stacked: bool = False) -> Chart:
        return Chart(title, series, help, floor=0, stacked=stacked)

    def shares(title: str, series: Mapping[str, str], help: str) -> Chart:
        return Chart(title, series, help, floor=0, percent=True)

    return [
        Chart("Reward", {"reward/mean": "mean reward"}, "Of the responses sampled for training."),
        Chart("Held-out reward", {"eval/reward": "held-out"}, "Of problems never trained on; greedy.", markers=True),
        Chart(
            "Loss of demonstrations",
            {"loss/sft": "training", "eval/loss": "held-out"},
            "SFT: mean of -log pi over tokens, in nats.",
            markers=True,
        ),
        Chart("Reward parts", last(parts), "What the reward is made of, as means over responses."),
        Chart("Spread of the reward", spread, "Quantiles over the responses of a step."),
        Chart("Measured beside the reward", last(measures), "What the task logs and does not pay for."),
        shares("Groups without signal", {"reward/zero_std_fraction": "zero spread"}, "All responses earn the same."),
        above_0("Response length", {"response/mean_length": "mean", "response/max_length": "longest"}, "In tokens."),
        shares("Cut-off and repetitive responses", odd, "At the length limit; said before in the same response."),
        above_0("Entropy", {"entropy": "entropy"}, "Nats a token. Near zero the policy stopped exploring."),
        above_0("KL divergence", {"kl/ref": "to the reference", "kl/sampler": "to the sampler"}, "Nats a token."),
        shares("Clipped tokens", clipped, "Their ratio left the clip range; few where a batch is trained on once."),
        above_0("Gradient norm", {"grad_norm": "before clipping"}, "Spikes come before a run falls apart."),
        Chart("Loss", last(LOSS), "Its value says little in policy gradients; its parts should stay in proportion."),
        above_0("Sampler against trainer", MISMATCH, "Log-probabilities on the same weights: small gaps are rounding."),
        above_0("Busiest expert", {"router/load_max_over_mean": "worst layer"}, "Its tokens over the layer's mean."),
        above_0("Staleness", last(stale), "Versions between the weights that sampled a token and those trained."),
        above_0("Throughput", rates, "Tokens per second."),
        above_0("Time of a step", phases, "Seconds per phase, stacked.", stacked=True),
        shares(
            "Share of the machine's roofline", roofline, "Time at the machine's measured best, over the time taken."
        ),
        above_0("Learning rate", {"lr": "learning rate"}, "As scheduled."),
    ]


def draw(chart: Chart, rows: Sequence[Mapping[str, float]]) -> Drawing | None:
    """The chart as SVG, or None where none of its series has a finite value."""
    series = {name: _series(name, rows) for name in chart.series}
    series = {name: (x, y) for name, (x, y) in series.items() if np.isfinite(y).any()}
    if not series:
        return None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "grpo_rl", "font.size": 8}):
        figure = Figure(figsize=(4.4, 1.9), layout="constrained")
        axes = figure.subplots()
        if chart.stacked and len(next(iter(series.values()))[0]) > 1:
            _stack(axes, series)
        else:
            for (x, y), colour in zip(series.values(), _SERIES * len(series), strict=False):
                _line(axes, x, y, colour, chart.markers)
        _style(axes, chart)
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    curves = []
    for i, (name, (_, y)) in enumerate(series.items()):
        bad = sum(not math.isfinite(row[name]) for row in rows if name in row)
        ends = _ends(y, chart.percent) + (f" ({bad} not finite)" if bad else "")
        curves.append(Curve(chart.series[name], _VARIABLES[_SERIES[i % len(_SERIES)]], ends))
    return Drawing(chart.title, chart.help, _inline(buffer.getvalue(), chart.title), curves)


def number(value: float) -> str:
    """A value to three significant digits, as a person writes it.

    >>> number(1930.4), number(0.03456), number(1e-05), number(float("nan"))
    ('1,930', '0.0346', '1e-05', 'n/a')
    """
    if not math.isfinite(value):
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _series(name: str, rows: Sequence[Mapping[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    points = [(row["step"], row[name]) for row in rows if name in row]
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    y = np.where(np.isfinite(y), y, np.nan)  # a gap in the line
    if len(x) > MAX_POINTS:
        bins = np.array_split(np.arange(len(x)), MAX_POINTS)
        x, y = np.array([x[b].mean() for b in bins]), np.array([finite_mean(y[b]) for b in bins])
    return x, y


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, markers: bool) -> None:
    # A single point draws no line.
    marker = "o" if markers or np.isfinite(y).sum() == 1 else None
    smooth = len(x) >= SMOOTH_FROM and not markers
    axes.plot(
        x, y, color=colour, linewidth=0.8 if smooth else 1.6, alpha=0.35 if smooth else 1, marker=marker, markersize=4
    )
    if smooth:
        half = max(len(x) // 24, 2)
        means = [finite_mean(y[max(i - half, 0) : i + half + 1]) for i in range(len(y))]
        axes.plot(x, means, color=colour, linewidth=1.8)


def _stack(axes: Axes, series: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    # Phases need not all run in every step (evaluation, checkpoint): where one is missing it took no time.
    steps = np.unique(np.concatenate([x for x, _ in series.values()]))
    layers = []
    for x, y in series.values():
        layer = np.zeros(len(steps))
        layer[np.searchsorted(steps, x)] = np.nan_to_num(y)
        layers.append(layer)
    axes.stackplot(steps, layers, colors=(_SERIES * len(layers))[: len(layers)], linewidth=0, alpha=0.85)


def _style(axes: Axes, chart: Chart) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(x=0.01)
    first, last = axes.dataLim.intervalx
    if first == last:  # one step; the locator would mark fractions of it
        axes.set_xlim(first - 1, last + 1)
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chart.floor is not None:
        low, high = axes.dataLim.intervaly
        # A series that is zero throughout would otherwise lie in the middle of an axis that goes below nought.
        axes.set_ylim(min(low, chart.floor), high + 0.05 * (high - chart.floor) if high > chart.floor else 1)


def _ends(y: np.ndarray, percent: bool) -> str:
    def text(value: float) -> str:
        return f"{number(100 * value)} %" if percent else number(value)

    tenth = max(len(y) // 10, 1)
    return text(y[0]) if len(y) == 1 else f"{text(finite_mean(y[:tenth]))} → {text(finite_mean(y[-tenth:]))}"


def _inline(svg: str, title: str) -> str:
    """The SVG element alone, with CSS variables for colours and ids that are unique in the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    slug = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{slug}-", svg)
    # Without a size of its own it takes the width of its card; the viewBox keeps its shape.
    for size in ("width", "height"):
        svg = re.sub(rf'<svg ([^>]*?)\s*{size}="[^"]*"', r"<svg \1", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title} by step" ', 1)
