"""Compares this tree with an earlier commit, bit for bit: `python benchmarks/bit_identical.py --before REV`.

Both scripts run at the commit and in this tree, with the same overrides, seed, model, rows and number of threads
(`OMP_NUM_THREADS`, 1 by default). Compared are, of each run:

- `metrics.jsonl`: the names of all metrics, and all values but measurements of time and memory;
- the weights it exported, tensor by tensor, and the last evaluation;
- `completions.parquet` and `tokens.parquet`: every column of every row, so every sampled token, its
  policy version, its log-probabilities, its advantage and what the loss made of it.

In an asynchronous run vLLM draws tokens in the order in which requests reach it, which differs between two runs of one
commit, too. With `train.max_staleness=0` all else is decided: which groups of which rows each optimizer step takes, the
policy version of each response, what was started, trained and dropped. That is compared, and this tree replays the
commit's steps (`grpo-rl replay`): on the same tokens its losses have to be the stored ones.

With `--keep FOLDER` runs of the commit stay there, and only this tree's are made the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file
from step_vs_before import checkout

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from tiny_runs import same, tiny_run, without_clocks

ROOT = Path(__file__).resolve().parents[1]
TINY = ["train.total_dialog_turns=48", "train.lineage=true"]
LOSSES = ["train.epochs=2", "policy.kl_coef=0.1", "policy.entropy_coef=0.01", "loss.advantage=leave_one_out"]
LORA = ["train_model.lora.rank=4", "train_model.lora.targets=[q_proj,up_proj,down_proj]", "policy.kl_coef=0.1"]
IN_TURNS = ["inference_model.engine=vllm", "train.max_staleness=0", "train.optim_batch_size=16"]
CALCULATOR = [
    "--config-name=grpo_calculator", "env.path=arithmetic", "env.num_envs=4", "env.repeats=4",
    "train.optim_batch_size=8", "train.total_dialog_turns=32", "train.lineage=true", "sampling.max_new_tokens=24",
    "optimizer.lr=5e-5", "inference_model.engine=transformers",
]  # fmt: skip
QUICKSTART = ["+experiment=quickstart", "inference_model.engine=transformers", "train.lineage=true"]
RUNS: dict[str, tuple[str, bool, list[str]]] = {
    "sync": ("grpo.py", True, [*TINY, "evaluate.rows=4"]),
    "losses": ("grpo.py", True, [*TINY, *LOSSES]),
    "lora": ("grpo.py", True, [*TINY, *LORA, "train_model.lora.dropout=0.1"]),
    "multi_turn": ("grpo.py", False, CALCULATOR),
    "async": ("grpo_async.py", True, [*TINY, *IN_TURNS, "train.total_dialog_turns=64"]),
    "quickstart": ("grpo.py", False, QUICKSTART),
}
"""Script, whether on the tiny model, and overrides of each run."""


def rows(folder: Path) -> list[dict[str, Any]]:
    """The logged rows of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table(name: str) -> Callable[[Path], Any]:
    """Reads the rows of a run's Parquet folder, in which NaN equals NaN."""

    def read(run: Path) -> list[dict[str, Any]]:
        if not (run / name).exists():
            return []
        columns = pq.read_table(run / name).to_pylist()
        return sorted(columns, key=lambda row: [str(row.get(key)) for key in ("step", "group_id", "response")])

    return read


DECIDED = ("step", "policy_version", "staleness/", "groups/", "engines/", "lr", "train/optimizer_steps")
"""Beginnings of metrics that do not depend on what was sampled."""
ORIGIN = ("step", "epoch", "optimizer_step", "group_id", "response", "row", "policy_version")
"""Columns of the tokens that do not."""
VIEWS: dict[str, Callable[[Path], Any]] = {
    "names of metrics": lambda run: [sorted(row) for row in rows(run)],
    "metrics": lambda run: [without_clocks(row) for row in rows(run)],
    "weights": lambda run: {str(path.name): load_file(path) for path in sorted(run.glob("model/*.safetensors"))},
    "evaluation": lambda run: [json.loads(path.read_text())["rewards"] for path in run.glob("evaluation.json")],
    **{name: table(name) for name in ("completions.parquet", "tokens.parquet")},
}
ASYNC_VIEWS: dict[str, Callable[[Path], Any]] = {
    "names of metrics": lambda run: sorted({name for row in rows(run) for name in row}),
    "metrics": lambda run: [{k: v for k, v in row.items() if k.startswith(DECIDED)} for row in rows(run)],
    "tokens": lambda run: sorted({tuple(row[name] for name in ORIGIN) for row in table("tokens.parquet")(run)}),
}


def first_difference(a: Any, b: Any, where: str = "") -> str:
    """The place and the values of the first difference of two trees.

    >>> first_difference([{"loss": 1.0}], [{"loss": 2.0}])
    '/0/loss: 1.0 before, 2.0 now'
    """
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(key, a[key], b[key]) for key in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(str(i), x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, dict) and isinstance(b, dict):
        return f"{where}: only before {sorted(a.keys() - b.keys())}, only now {sorted(b.keys() - a.keys())}"
    else:
        size = f"{len(a)} and {len(b)} entries" if isinstance(a, list) and isinstance(b, list) else ""
        return f"{where}: {size or f'{str(a)[:80]} before, {str(b)[:80]} now'}"
    return next((first_difference(x, y, f"{where}/{key}") for key, x, y in pairs if not same(x, y)), "")


def compare(before: Path, now: Path, views: Mapping[str, Callable[[Path], Any]]) -> list[str]:
    """The parts in which two finished runs differ, each with its first difference."""
    wrong = []
    for name, view in views.items():
        left, right = view(before), view(now)
        if not same(left, right):
            wrong.append(f"{name} {first_difference(left, right)}")
    return wrong


def run(root: Path, script: str, overrides: list[str], folder: Path) -> float:
    """Runs a script of the tree at ``root``; its seconds.

    Raises:
        SystemExit: the run failed.
    """
    command = [sys.executable, str(root / "sota" / script), *overrides, f"hydra.run.dir={folder}", "train.seed=0"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with open(folder.with_suffix(".log"), "w") as log:
        environment = os.environ | {"PYTHONPATH": str(root)}
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, cwd=folder.parent).returncode
    if code:
        sys.exit(f"error: {' '.join(command)} ended with {code}:\n{folder.with_suffix('.log').read_text()[-3000:]}")
    return time.monotonic() - begun


def replayed(run: Path) -> list[str]:
    """Steps of a stored run whose losses are others when this tree computes them again."""
    wrong = []
    for step in (row["step"] for row in rows(run)):
        command = [sys.executable, "-m", "grpo_rl.cli", "replay", str(run), str(step), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        gap = json.loads(done.stdout)["recorded_gap"] if done.returncode == 0 else done.stderr[-500:]
        if gap != 0.0:
            wrong.append(f"replay of step {step}: {gap}")
    return wrong


def main() -> int:
    """Prints what differs; 1 where anything does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", required=True, metavar="REV", help="the earlier commit")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the commit's runs stay, to be used again")
    parser.add_argument("--no-after", action="store_true", help="make the commit's runs alone")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wrong = 0
    with contextlib.ExitStack() as stack:
        work = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bit_identical_")))
        work, before = work.resolve(), stack.enter_context(checkout(options.before))
        work.mkdir(parents=True, exist_ok=True)
        if not (tiny := work / "tiny.json").exists():
            tiny.write_text(json.dumps(tiny_run(work)))
        for name in options.only:
            script, is_tiny, overrides = RUNS[name]
            overrides = [*json.loads(tiny.read_text()), *overrides] if is_tiny else overrides
            asked, done = json.dumps([options.before, os.environ["OMP_NUM_THREADS"], *overrides]), work / f"{name}.done"
            if not done.exists() or done.read_text() != asked:
                shutil.rmtree(work / "before" / name, ignore_errors=True)
                print(f"{name} before: {run(before, script, overrides, work / 'before' / name):.0f} s", flush=True)
                done.write_text(asked)
            if options.no_after:
                continue
            shutil.rmtree(work / "now" / name, ignore_errors=True)
            print(f"{name} now: {run(ROOT, script, overrides, work / 'now' / name):.0f} s", flush=True)
            is_async = script == "grpo_async.py"
            found = compare(work / "before" / name, work / "now" / name, ASYNC_VIEWS if is_async else VIEWS)
            found += replayed(work / "before" / name) if is_async else []
            wrong += bool(found)
            print(f"{name}: " + ("\n  ".join(["DIFFERS", *found]) if found else "equal"), flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
