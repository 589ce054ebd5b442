"""SFT, then GRPO, against GRPO alone at equal cost on the quickstart: `python benchmarks/warm_start.py --seeds 0 1 2`.

Cost is the seconds of the training steps (sampling, scoring, training, pushes), on a machine that does nothing else;
starting, evaluating and saving are not counted. The warm run does the quickstart's SFT and then so many steps of GRPO.
GRPO alone gets as many steps more as fit into the seconds that SFT took, by the mean step of the warm run's GRPO. Both
are evaluated greedily on the same held-out problems; the difference is paired, its interval Student's t.

With ``--tiny`` a random model of two layers does it on six rows, in a minute: the figures then mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from grpo_rl.intervals import paired_gain
from grpo_rl.monitor.metrics import read_metrics, step_seconds
from grpo_rl.report.files import read_evaluation

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from tiny_runs import tiny_run

ROOT = Path(__file__).resolve().parents[1]
RESPONSES_A_STEP = {False: 128, True: 16}
SAMPLING = (
    "env.num_envs",
    "env.repeats",
    "train.total_dialog_turns",
    "train.optim_batch_size",
    "inference_model.engine",
)
"""Settings of the tiny run that SFT has none of, or other ones."""


def run(script: str, folder: Path, words: list[str]) -> float:
    """Runs a script of sota/ in a process of its own; the seconds of its steps."""
    subprocess.run([sys.executable, str(ROOT / "sota" / script), *words, f"hydra.run.dir={folder}"], check=True)
    return sum(step_seconds(row) or 0.0 for row in read_metrics(folder))


def rewards(folder: Path) -> list[float]:
    """The held-out rewards at the end of a run."""
    found = read_evaluation(folder, json.loads((folder / "summary.json").read_text())["steps"])
    assert found is not None, f"{folder} has no evaluation of its last step"
    return found[0]


def compare(seed: int, steps: int, folder: Path, tiny: bool, extra: list[str]) -> None:
    """Runs both with one seed, and prints what they cost and gave."""
    if tiny:
        common = [*tiny_run(folder / "tiny"), "evaluate.rows=6", "sampling.max_new_tokens=10"]
        sft = [word for word in common if not word.startswith(SAMPLING)]
    else:
        common, sft = ["+experiment=quickstart"], ["+experiment=quickstart_sft"]
    common = [*common, f"train.seed={seed}", *extra]
    turns = RESPONSES_A_STEP[tiny]
    warm_up = run("sft.py", folder / "sft", [*sft, f"train.seed={seed}"])
    model = f"model.name={folder / 'sft' / 'model'}"
    after = run("grpo.py", folder / "warm", [*common, model, f"train.total_dialog_turns={steps * turns}"])
    more = round(warm_up / (after / steps))
    alone = run("grpo.py", folder / "alone", [*common, f"train.total_dialog_turns={(steps + more) * turns}"])
    cold, warm = rewards(folder / "alone"), rewards(folder / "warm")
    gain = paired_gain(cold, warm)
    means = f"{sum(warm) / len(warm):.3f} warm, {sum(cold) / len(cold):.3f} alone"
    spent = f"SFT {warm_up:.0f} s, then {steps} steps of GRPO {after:.0f} s; alone {steps + more} steps {alone:.0f} s"
    print(f"seed {seed}: {spent}")
    print(
        f"seed {seed}: held-out reward {means}; warm - alone {gain.mean:+.3f}, 95 % interval {gain.low:+.3f} to "
        f"{gain.high:+.3f} over {len(cold)} problems"
    )


def main() -> None:
    """Runs the comparison for each seed."""
    parser = argparse.ArgumentParser(description="SFT and then GRPO against GRPO alone, at equal seconds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=15, help="steps of GRPO after SFT")
    parser.add_argument("--tiny", action="store_true", help="a random model, as a check of this script")
    parser.add_argument("--folder", type=Path, help="where the runs stay; by default a temporary folder")
    parser.add_argument("settings", nargs="*", help="further settings of GRPO")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            folder = (arguments.folder or Path(temporary)) / f"seed_{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "tiny").mkdir(exist_ok=True)
            compare(seed, arguments.steps, folder.resolve(), arguments.tiny, arguments.settings)


if __name__ == "__main__":
    main()
