"""Curves of quickstart runs (rewards 0 to 3, with evaluation) as one SVG: `python sota/plot.py OUT.svg RUN_FOLDER...`.

A run is named by its seed, or as in NAME=RUN_FOLDER; runs of one name have one colour.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from grpo_rl.monitor.metrics import read_metrics


def plot(out, runs):
    plt.rcParams["svg.fonttype"] = "none"
    figure, (train, held_out) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=[3, 1], sharey=True)
    colours = {}
    for name, _, folder in (run.rpartition("=") for run in runs):
        summary = json.loads(Path(folder, "summary.json").read_text())
        rows = [row for row in read_metrics(folder) if "reward/mean" in row]
        name = name or f"seed {summary['seed']}"
        label = None if name in colours else name
        line = {"color": colours.setdefault(name, f"C{len(colours)}"), "linewidth": 1}
        train.plot([row["step"] for row in rows], [row["reward/mean"] for row in rows], label=label, **line)
        held_out.plot([0, 1], [summary["eval_before"], summary["eval_after"]], marker="o", **line)
    train.set(title="reward of sampled responses", xlabel="step", ylabel="reward (at most 3)", ylim=(0, 3))
    held_out.set(title="held out, greedy", xticks=[0, 1], xticklabels=["before", "after"], xlim=(-0.3, 1.3))
    train.legend(frameon=False)
    for axes in (train, held_out):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    plot(sys.argv[1], sys.argv[2:])
