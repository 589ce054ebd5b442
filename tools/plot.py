"""Curves of a recipe's runs, with evaluation, as one SVG: `python tools/plot.py OUT.svg RUN_FOLDER...`.

A run is named by its seed, or as in NAME=RUN_FOLDER; runs of one name have one colour. With `--parts` before OUT.svg
each run has a column of its own: the parts of its reward, and the lengths of its responses.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from grpo_rl.monitor.metrics import read_metrics

NOT_PARTS = {"reward/mean", "reward/std", "reward/zero_std_fraction", "reward/sampled_mean"}


def plot(out, runs):
    plt.rcParams["svg.fonttype"] = "none"
    figure, (train, held_out) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=[3, 1], sharey=True)
    colours = {}
    for name, _, folder in (run.rpartition("=") for run in runs):
        summary = json.loads(Path(folder, "summary.json").read_text())
        rows, evaluated = (
            [(row["step"], row[key]) for row in read_metrics(folder) if key in row]
            for key in ("reward/mean", "eval/reward")
        )
        name = name or f"seed {summary['seed']}"
        label = None if name in colours else name
        line = {"color": colours.setdefault(name, f"C{len(colours)}"), "linewidth": 1}
        train.plot(*zip(*rows, strict=True), label=label, **line)
        held_out.plot(*zip(*evaluated, strict=True), marker="o", **line)
    train.set(title="reward of sampled responses", xlabel="step", ylabel="reward")
    held_out.set(title="held out, greedy", xlabel="step")
    train.legend(frameon=False)
    save(figure, out)


def plot_parts(out, runs):
    plt.rcParams["svg.fonttype"] = "none"
    figure, columns = plt.subplots(2, len(runs), figsize=(3.2 * len(runs), 4.4), sharex="col", squeeze=False)
    for (reward, length), (name, _, folder) in zip(columns.T, (run.rpartition("=") for run in runs), strict=True):
        rows = [row for row in read_metrics(folder) if "reward/mean" in row]
        steps = [row["step"] for row in rows]
        for key in sorted(key for key in rows[0] if key.startswith("reward/") and key not in NOT_PARTS):
            reward.plot(steps, [row[key] for row in rows], label=key.removeprefix("reward/"), linewidth=1)
        length.plot(steps, [row["response/mean_length"] for row in rows], color="grey", linewidth=1)
        reward.set(title=name, ylim=(0, None))
        length.set(xlabel="step", ylim=(0, None))
        reward.legend(frameon=False, fontsize="small")
    columns[0, 0].set(ylabel="reward, by part")
    columns[1, 0].set(ylabel="tokens of a response")
    save(figure, out)


def save(figure, out):
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    if sys.argv[1] == "--parts":
        plot_parts(sys.argv[2], sys.argv[3:])
    else:
        plot(sys.argv[1], sys.argv[2:])
