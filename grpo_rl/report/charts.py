"""The curves of one or several runs: which metrics are drawn together, and their values in columns."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from grpo_rl.monitor.metrics import STEP_PHASES, finite_mean, first_and_last, is_reward_statistic, step_seconds
from grpo_rl.report.files import read_rows

T = TypeVar("T")
CLOCKS = frozenset({"time", "time/at_s"})
"""Metrics that place a line in time, without information on the run."""
EVALUATION = frozenset({
    "loss", "reward", "sampled_reward", "standard_error", "failed", "mean_length", "truncated_fraction", "accuracy",
    "tied",
})  # fmt: skip
"""Names under ``eval/`` other than the parts of the held-out reward, pass@k and maj@k."""
HEAD, UNCHANGED = "Summary", "Unchanged"
"""Groups of the charts in the head of the page, and of those whose metrics have each kept one value."""
FEWEST = 3
"""Fewest values of a metric that can count as unchanged."""
APART = CLOCKS | {"time/evaluate_s"}
"""Metrics that no pattern takes."""


@dataclass(frozen=True)
class Chart:
    """A chart: metrics that are drawn together, and what they show.

    Args:
        series: metric name -> label. Series that no run logged are left out; the others keep their colours. A ``*`` in
            both stands for each logged name of this form.
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


def _quantiles(part: str) -> dict[str, str]:
    return {f"reward_distribution/{part}/p{p}": f"{p} % earn less" for p in (90, 50, 10)}


# What SFT alone has comes last, and leaves the others their colours.
PHASES = {f"time/{phase}_s": phase for phase in sorted(STEP_PHASES, key="read".__eq__)}
DEMONSTRATIONS = [
    Chart(HEAD, "SFT loss", {"loss/sft": "training", "eval/loss": "held-out"},
          "The mean of -log pi over their tokens, in nats. Where the held-out one rises, the data is learnt by heart.",
          markers=True),
    Chart("Demonstrations", "Epochs", {"train/epoch": "epochs"}, "Since the run's start.", 0),
    Chart("Demonstrations", "Demonstration tokens", {"train/tokens": "tokens"}, "Those that a step imitates.", 0),
]  # fmt: skip
REWARD = [
    Chart(HEAD, "Reward",
          {"reward/mean": "mean reward", "reward/sampled_mean": "with the groups that were filtered out"},
          "The mean over the responses of a training step."),
    Chart(HEAD, "Held-out reward", {"eval/reward": "held-out", "eval/sampled_reward": "of sampled responses"},
          "The mean reward of problems that are never trained on. Responses are greedy unless noted.", markers=True),
]  # fmt: skip
TASKS = [
    Chart("Tasks", "Reward by task", {"reward/{}/mean": "{}"}, "The mean over the responses to a task's prompts."),
    Chart("Tasks", "Zero-variance groups by task", {"reward/{}/zero_std_fraction": "{}"}, "They teach nothing.", 0,
          percent=True),
    Chart("Tasks", "Response length by task", {"response/{}/mean_length": "{}"}, "The tokens of a response.", 0),
    Chart("Tasks", "Truncated responses by task", {"response/{}/truncated_fraction": "{}"},
          "They reached the length limit.", 0, percent=True),
    Chart("Tasks", "Failures by task", {"failed/{}": "{}"},
          "Responses without a reward since the start of the run.", 0),
    Chart("Tasks", "Groups by task", {"mixture/{}": "{}"},
          "Their numbers in a step, drawn by the weights of env.mixture.", 0),
]  # fmt: skip
"""Charts of a mixture's tasks, a line a task, whose name stands for ``{}``."""
HELD_OUT = [
    Chart("Held-out", "Standard error of the held-out reward", {"{}standard_error": "{}"},
          "How far chance moves the mean reward.", 0, markers=True),
    Chart("Held-out", "Held-out response length", {"{}mean_length": "{}"},
          "The mean number of tokens of a greedy response.", 0, markers=True),
    Chart("Held-out", "Held-out responses truncated", {"{}truncated_fraction": "{}"},
          "Greedy responses that reached the length limit.", 0, percent=True, markers=True),
    Chart("Held-out", "Tied majorities", {"{}tied": "{}"},
          "Problems of which several answers are the most frequent one.", 0, percent=True, markers=True),
    Chart("Held-out", "Held-out responses without a reward", {"{}failed": "{}"},
          "Responses whose scorer failed.", 0, markers=True),
]  # fmt: skip
"""Charts of evaluations, a line a task, whose prefix stands for ``{}``."""
STEPS = [
    Chart("Reward", "Reward distribution", _quantiles("total") | {"reward/std": "standard deviation"},
          "How the responses of a step differ in their reward."),
    Chart("Reward", "Measures outside the reward", {"measure/*": "*"},
          "What the task logs and does not pay for, as means over responses."),
    Chart("Reward", "Zero-variance groups", {"reward/zero_std_fraction": "of all groups"},
          "All responses of such a group earn the same; the policy learns nothing from it.", 0, percent=True),
    Chart("Responses", "Response length", {"response/mean_length": "mean", "response/max_length": "longest"},
          "The tokens of a response, without the prompt.", 0),
    Chart("Responses", "Truncated and repetitive responses",
          {"response/truncated_fraction": "truncated", "response/repetition": "repeated 4-grams"},
          "truncated: responses that reached the length limit. repeated: 4-grams that the response had before.", 0,
          percent=True),
    Chart("Responses", "Length-reward correlation", {"response/length_correlation": "correlation"},
          "Above zero the longer responses of a group earn more than the shorter ones."),
    Chart("Policy", "Entropy", {"entropy": "entropy"},
          "Nats a token: the policy's remaining exploration. Near zero it has stopped exploring.", 0),
    Chart("Policy", "KL divergence", {"kl/ref": "to the reference", "kl/sampler": "to the sampler"},
          "Nats a token: how far the policy is from each.", 0),
    Chart("Policy", "KL coefficient", {"kl/coef": "kl_coef"}, "Its factor in loss or reward.", 0),
    Chart("Policy", "Clipped tokens",
          {"clip/low_fraction": "below", "clip/high_fraction": "above", "clip/dual_fraction": "dual clip"},
          "Tokens whose ratio left the clip range; there are few where a batch is trained on once.", 0, percent=True),
    Chart("Policy", "Advantages", {"advantage/mean": "mean", "advantage/std": "standard deviation"},
          "How much better than its group a response is counted, over the responses of a step."),
    Chart("Policy", "Gradient norm", {"grad_norm": "before clipping"},
          "Spikes often come before a run falls apart.", 0),
    Chart("Policy", "Loss", {f"loss/{name}": name for name in ("total", "objective", "kl", "entropy")},
          "The value of a policy-gradient loss means little; its parts should stay in proportion."),
    Chart("Policy", "Learning rate", {"lr": "learning rate"}, "The rate of the step, as scheduled.", 0),
    Chart("Sampler and trainer", "Sampler-trainer mismatch", {"mismatch/mean": "mean", "mismatch/max": "largest"},
          "The gap between their log-probabilities of a token on the same weights; small gaps are rounding.", 0),
    Chart("Sampler and trainer", "Sampler-trainer mismatch on later weights", {"mismatch/stale_*": "* versions old"},
          "The same gap where weights moved after the token was sampled; 0: in the step's later optimizer steps.", 0),
    Chart("Sampler and trainer", "Probability mass kept by top-k and top-p",
          {"mismatch/mass_kept": "kept by top-k and top-p"},
          "The trainer's probability of the tokens that the sampler's settings allow.", 0, percent=True),
    Chart("Sampler and trainer", "Effective sample size", {"ess": "of the loss", "correction/ess": "of the correction"},
          "As a share of the tokens, weighted by their ratios; 100 %: all weigh the same.", 0, percent=True),
    Chart("Sampler and trainer", "Off-policy correction",
          {"correction/mean": "mean weight", "correction/bounded_fraction": "bounded, as a share"},
          "The weights that make up for older policies.", 0),
    Chart("Sampler and trainer", "Staleness", {"staleness/mean": "mean", "staleness/max": "largest"},
          "Versions between the weights that sampled a token and those that are trained.", 0),
    Chart("Sampler and trainer", "Expert load", {"router/load_max_over_mean": "worst layer"},
          "The tokens of the busiest expert over the mean of its layer.", 0),
    Chart("Work", "Groups", {"groups/*": "*", "sample/filtered_groups": "filtered out"},
          "Groups by what became of them in the step; open: begun and not yet trained on.", 0),
    Chart("Work", "Draft acceptance rate", {"drafts/accepted_fraction": "since the start"},
          "Of the drafted tokens, those that the policy sampled (inference_model.speculative).", 0, percent=True),
    Chart("Work", "Optimizer steps and micro-batches",
          {"train/optimizer_steps": "optimizer steps", "train/micro_batches": "micro-batches"},
          "Optimizer steps, and the micro-batches that they are made of.", 0),
    Chart("Work", "Micro-batch size", {"train/micro_batch_tokens": "mean"},
          "Tokens of responses that are trained on, on average; prompts come on top.", 0),
    Chart("Work", "Out of memory",
          {"train/out_of_memory": "training, in the step", "engine/out_of_memory": "engine, so far"},
          "Each time it went on with less at a time, at the same gradient.", 0),
    Chart("Work", "Skipped",
          {"train/skipped_groups": "groups without a gradient", "optimizer/skipped_steps": "optimizer steps"},
          "Zero-variance groups need no forward pass; an optimizer step is skipped where its gradient is not finite.",
          0),
    Chart("Work", "Responses so far", {"total/responses": "responses"}, "All that were sampled for training.", 0),
    Chart("Work", "Tokens so far", {"total/sampled_tokens": "sampled", "total/trained_tokens": "trained on"},
          "Tokens of responses since the run's start.", 0),
    Chart("Work", "Time so far", {"total/seconds": "seconds"},
          "Seconds of the run, with evaluations and checkpoints.", 0),
    Chart("Machine", "Ranks", {"ranks/size": "ranks", "ranks/restarts": "restarts"},
          "Processes that train together, and how often they were started again.", 0),
    Chart("Machine", "Throughput",
          {"throughput/sample_tokens_per_s": "sampling", "throughput/train_tokens_per_s": "training"},
          "Tokens of responses per second.", 0),
    Chart("Machine", "Step time", PHASES | {"time/*_s": "*"},
          "The seconds of each phase, one above the other.", 0, stacked=True),
    Chart("Machine", "Evaluation time", {"time/evaluate_s": "evaluation"}, "Seconds, between two steps.", 0,
          markers=True),
    Chart("Machine", "Roofline fraction",
          {"limit_fraction": "whole step"}
          | {f"limit_fraction/{phase}": phase for phase in ("sample", "score", "train", "sync")},
          "The time that the machine would need at its measured best, over the time taken.", 0, percent=True),
    Chart("Machine", "Memory",
          {"memory/peak_gib": "peak", "memory/engine_gib": "engine", "memory/peak_beside_engine_gib": "the rest"},
          "GiB of the training process, at its peak.", 0),
    Chart("Machine", "Memory limit", {"memory/limit_gib": "limit"},
          "GiB of the GPU, or of the machine or container without one.", 0),
]  # fmt: skip


def known_charts(names: Sequence[str]) -> Iterator[Chart]:
    """The charts that metrics of these names may belong to."""
    for chart in (*DEMONSTRATIONS, *REWARD, *_reward_parts(names), *_held_out(names), *STEPS):
        yield replace(chart, series=_expanded(chart.series, names))
    failed = {name: kind for name, kind in _below(names, "failed/").items() if f"mixture/{kind}" not in names}
    help = "Responses whose scorer failed, by what went wrong, and groups that were lost with them."
    yield Chart("Responses", "Failed scorers and groups", failed, help, 0)


def _expanded(series: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The series with those of the logged names that their patterns stand for."""
    found: dict[str, str] = {}
    for pattern, label in series.items():
        before, star, after = pattern.partition("*")
        if not star:
            found[pattern] = label
            continue
        for name, rest in _below(names, before).items():
            if rest.endswith(after) and name not in APART:
                found.setdefault(name, label.replace("*", rest.removesuffix(after)))
    return found


def _below(names: Sequence[str], prefix: str) -> dict[str, str]:
    """The metrics that begin with this, and the rest of their names."""
    return {name: name[len(prefix) :] for name in names if name.startswith(prefix)}


def _reward_parts(names: Sequence[str]) -> Iterator[Chart]:
    tasks = _below(names, "mixture/").values()
    for chart in TASKS:
        yield replace(chart, series={pattern.format(task): task for pattern in chart.series for task in tasks})
    parts = {name: part for name, part in _below(names, "reward/").items() if not is_reward_statistic(part)}
    parts.pop("reward/sampled_mean", None)
    yield Chart("Reward", "Reward parts", parts, "What the reward is made of, as means over responses.")
    for part in dict.fromkeys(rest.rpartition("/")[0] for rest in _below(names, "reward_distribution/").values()):
        if part and part != "total":
            help = "How the responses of a step differ in this part."
            yield Chart("Reward", f"Distribution of {part}", _quantiles(part), help)


def _held_out(names: Sequence[str]) -> Iterator[Chart]:
    found = _below(names, "eval/")
    tasks = [rest.removesuffix("/reward") for rest in found.values() if rest.endswith("/reward")]
    tasks = [task for task in tasks if task != "measure"]
    own = {name: rest for name, rest in found.items() if not rest.startswith(tuple(f"{task}/" for task in tasks))}
    yield Chart(
        "Held-out", "Held-out problems solved", _solved(own),
        "accuracy: the greedy response is right. pass@k: one of k sampled is. maj@k: the answer of most of them is.",
        0, percent=True, markers=True,
    )  # fmt: skip
    measures = _below(list(own), "eval/measure/")
    known = {*measures, *_solved(own)}
    parts = {name: rest for name, rest in own.items() if name not in known and rest not in EVALUATION}
    yield Chart("Held-out", "Held-out parts", parts, "What the held-out reward is made of.", markers=True)
    help = "What the task logs and does not pay for."
    yield Chart("Held-out", "Held-out measures outside the reward", measures, help, markers=True)
    for task in tasks:
        inner = _below(names, f"eval/{task}/")
        series = {name: rest for name, rest in inner.items() if rest in ("reward", "sampled_reward")} | _solved(inner)
        series |= {name: rest for name, rest in inner.items() if rest not in EVALUATION}
        yield Chart("Held-out", f"Held-out: {task}", series, "Reward and scores of one of several tasks.", markers=True)
    prefixes = {"eval/": "training task"} | {f"eval/{task}/": task for task in tasks}
    for chart in HELD_OUT:
        of_tasks = {pattern.format(at): label for pattern in chart.series for at, label in prefixes.items()}
        yield replace(chart, series=of_tasks)


def _solved(found: Mapping[str, str]) -> dict[str, str]:
    return {name: rest for name, rest in found.items() if rest == "accuracy" or rest.startswith(("pass@", "maj@"))}


MAX_POINTS = 2000
"""A longer series is shown in bins: no screen shows more, and a week's run must not make a 50 MB page."""
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
        moves = chart.group == HEAD or any(_moves(columns, metric) for metric, *_ in shown)
        fixed = {**vars(chart), "series": shown} | ({} if moves else {"group": UNCHANGED})
        if len(columns) == 1:
            drawn.append(fixed)
            continue
        for metric, label, *_ in shown:
            title = chart.title if len(shown) == 1 else f"{chart.title}: {label}"
            lines = [[metric, run["name"], i, i] for i, run in enumerate(columns) if metric in run["columns"]]
            drawn.append({**fixed, "title": title, "series": lines, "stacked": False})
    return {"runs": columns, "charts": sorted(drawn, key=lambda chart: chart["group"] == UNCHANGED)}


def _moves(runs: Sequence[Mapping[str, Any]], metric: str) -> bool:
    """True unless all values of a metric, in all runs, are one number, ``FEWEST`` times at least.

    >>> a, b = ({"columns": {"lr": {"values": [rate] * 3}}} for rate in (0.1, 0.2))
    >>> _moves([a], "lr"), _moves([a, b], "lr"), _moves([{"columns": {"lr": {"values": [None] * 3}}}], "lr")
    (False, True, True)
    """
    values = [value for run in runs for value in run["columns"].get(metric, {"values": []})["values"]]
    return len(values) < FEWEST or len(set(values)) > 1 or None in values


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


def binned(items: Sequence[T]) -> list[Sequence[T]]:
    """Neighbours together, in at most ``MAX_POINTS`` bins, all but the last of the same size.

    >>> [len(bin) for bin in binned(range(5001))][-2:], binned([1, 2])
    ([3, 3], [[1], [2]])
    """
    size = math.ceil(len(items) / MAX_POINTS) or 1
    return [items[i : i + size] for i in range(0, len(items), size)]


def _complete(values: Sequence[float | None]) -> list[float]:
    """The values where each step has one; else none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return known if len(known) == len(values) else []


def _digits(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
