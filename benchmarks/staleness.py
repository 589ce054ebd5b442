"""Simulates what a bound on staleness costs and gains: `python benchmarks/staleness.py` writes docs/staleness.svg.

8 engines and a trainer, 64 prompts x 8 responses a step, lengths log-normal with a 99th percentile of 8 medians. The
trainer is as fast as the engines sample a batch in turns (balanced), eight times as fast, or less than half as fast.
Nothing here depends on the machine: time is simulated.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from simulator import Outcome, SimulatorConfig, simulate

OUT = Path(__file__).parents[1] / "docs" / "staleness.svg"
BOUNDS = (0, 1, 2, 3, 4, 6, 8)
BALANCED = SimulatorConfig(engines=8, train_tokens_per_s=5e3, steps=60)
TRAINERS = {"balanced": 5e3, "a fast trainer": 4e4, "a slow trainer": 2e3}


def outcomes(steps: int) -> dict[str, dict[int, Outcome]]:
    """Outcomes by trainer and bound, each of so many steps."""
    return {
        name: {
            bound: simulate(replace(BALANCED, steps=steps, train_tokens_per_s=rate, max_staleness=bound))
            for bound in BOUNDS
        }
        for name, rate in TRAINERS.items()
    }


def ideal(turns: Outcome) -> float:
    """(T_s + T_t) / max(T_s, T_t): what overlapping two phases of these lengths can give."""
    return (turns.waiting + turns.training) / max(turns.waiting, turns.training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=BALANCED.steps, help="training steps of each simulation")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot")
    args = parser.parse_args()
    found = outcomes(args.steps)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "grpo_rl"})
    figure, (gain, waiting) = plt.subplots(1, 2, figsize=(9, 3.2))
    for name, by_bound in found.items():
        turns = by_bound[0]
        gains = [outcome.responses_per_s / turns.responses_per_s for outcome in by_bound.values()]
        gain.plot(BOUNDS, gains, marker="o", label=name)
        waiting.plot(BOUNDS, [outcome.waiting for outcome in by_bound.values()], marker="o", label=name)
        for bound, outcome in by_bound.items():
            gained = outcome.responses_per_s / turns.responses_per_s
            print(
                f"{name:15s} max_staleness={bound}: {gained:.2f} times taking turns (ideal of two phases "
                f"{ideal(turns):.2f}), trainer waits {outcome.waiting:.1%}, engines idle {outcome.idle:.1%}, staleness "
                f"{outcome.staleness_mean:.2f}, at most {outcome.staleness_max}"
            )
    gain.set(title="responses a second, over taking turns", xlabel="train.max_staleness", ylim=(0, None))
    waiting.set(title="share of time that the trainer waits", xlabel="train.max_staleness", ylim=(0, 1))
    gain.legend(frameon=False)
    for axes in (gain, waiting):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
