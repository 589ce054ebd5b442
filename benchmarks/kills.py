"""Kills runs, and checks that they go on as if nothing had happened: `python benchmarks/kills.py --kills 100`.

Short runs of a tiny model are started by one fixed command, `hydra.run.dir=X resume=auto`, killed with SIGKILL, and
started again until they are finished. Kill points are drawn from the duration of a run, and from the file operations
of its folder, before each of which it can end. Every start has to go on from the newest checkpoint, and what is left in
the end is compared with a run that nobody disturbed: weights, optimizer and random state of the last checkpoint,
exported model, metrics without clocks, completions, lineage, summary.

Starts are forks of a process that has imported everything, so that one takes a second and not ten. The exit code says
whether all was as it should be. File operations are counted by Python's audit events, which see those of Python alone:
writes of safetensors and of Arrow are hit by the kills that are drawn from the duration. Asynchronous runs are those of
kills_async.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "sota" / "grpo.py"
STEPS = 3
PATIENCE_S = 600
"""Seconds after which a start hangs."""
HUNG = 124
"""Status of a start that was ended because it hung, as that of ``timeout``."""
OPERATIONS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
"""Audit events of file operations, beside opening to write."""


@dataclass
class Start:
    """A start of the script: how it ended, how long it took, how many file operations it came to, what it said."""

    status: int
    seconds: float
    operations: int
    said: str


@dataclass
class Outcome:
    """The outcome of the kills."""

    kills: int = 0
    starts: int = 0
    runs: int = 0
    faults: list[str] = field(default_factory=list)


def overrides(folder: Path) -> list[str]:
    """The overrides of a run of a few steps, which stores its lineage."""
    from grpo_rl.testing import tiny_run

    few = ["train.optim_batch_size=16", f"train.total_dialog_turns={STEPS * 16}", "train.keep_checkpoints=2"]
    return [*tiny_run(folder), *few, "train.lineage=true", "evaluate.rows=4"]


def fork(arguments: list[str], folder: Path, kill_s: float | None = None, kill_at: int | None = None) -> Start:
    """Starts sota/grpo.py as a fork of this process, and kills it with all it started.

    Args:
        kill_s: after so many seconds.
        kill_at: before the file operation of this number, from 0.
    """
    log, count = folder.with_suffix(".log"), folder.with_suffix(".operations")
    begun = time.monotonic()
    if not (child := os.fork()):
        _be_the_run(arguments, folder, log, count, kill_at)
    status = None
    try:
        while status is None:
            ended, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            passed = time.monotonic() - begun
            hangs = passed > PATIENCE_S
            if status is None and (hangs or (kill_s is not None and passed >= kill_s)):
                _kill(child)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                status = HUNG if hangs else status
            time.sleep(0.002)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    operations = count.stat().st_size if count.exists() else 0
    return Start(status, time.monotonic() - begun, operations, log.read_text())


def _kill(child: int) -> None:
    """Kills a fork that runs, and all it started; in its first moments it has no process group of its own."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _be_the_run(arguments: list[str], folder: Path, log: Path, count: Path, kill_at: int | None) -> None:
    """The rest of a forked process's life."""
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        tally = os.open(count, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        within, seen = str(folder), 0

        def on_event(event: str, args: tuple) -> None:
            nonlocal seen
            if event != "open" and event not in OPERATIONS:
                return
            if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            if isinstance(args[0], str | os.PathLike) and os.fspath(args[0]).startswith(within):
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1
                os.write(tally, b".")

        sys.addaudithook(on_event)
        sys.argv = [str(SCRIPT), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in a run's folder; None where there is none."""
    from grpo_rl.training.checkpoint import checkpoints

    found = checkpoints(folder / "checkpoints")
    return int(found[-1].stem.rpartition("_")[2]) if found else None


def went_on(start: Start, newest: int | None) -> str | None:
    """The fault in how a start began, in the folder whose newest checkpoint was of this step; None: nothing."""
    if "is finished after" in start.said:
        return None
    resumed = [int(step) for step in re.findall(r"Resumed after step (\d+)", start.said)]
    expected = [newest] if newest is not None else []
    # One that was killed before it said anything is judged by those after it.
    if resumed != expected and (resumed or start.status != -signal.SIGKILL):
        return f"went on from {resumed or 'the beginning'}, the newest checkpoint being of step {newest}"
    return None


def same(a: Any, b: Any) -> bool:
    """Tells whether two trees of tensors, numbers and texts are equal to the last bit."""
    import torch

    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b or (a != a and b != b)


def differences(folder: Path, whole: Path) -> list[str]:
    """The differences of a finished run from the undisturbed one."""
    import pyarrow.parquet as pq

    from grpo_rl.monitor.metrics import read_metrics
    from grpo_rl.testing import without_clocks
    from grpo_rl.training.checkpoint import checkpoints, load

    def checkpoint(run: Path) -> dict[str, Any]:
        state = load(checkpoints(run / "checkpoints")[-1])
        return {name: value for name, value in state.items() if name not in ("seconds", "config", "origin")}

    def summary(run: Path) -> dict[str, Any]:
        return without_clocks(json.loads((run / "summary.json").read_text()))

    def names(run: Path) -> list[str]:
        # Set aside or half written, by a process that was killed and that none has followed: nobody reads them.
        left = (path.relative_to(run) for path in run.rglob("*") if not path.name.startswith("."))
        aside = (".log", ".abandoned", ".old")
        return sorted(str(path) for path in left if not any(part.endswith(aside) for part in path.parts))

    views: dict[str, Callable[[Path], Any]] = {
        "metrics": lambda run: [without_clocks(row) for row in read_metrics(run)],
        "completions": lambda run: pq.read_table(run / "completions.parquet").to_pylist(),
        "tokens": lambda run: pq.read_table(run / "tokens.parquet").to_pylist(),
        "held_out": lambda run: pq.read_table(run / "held_out.parquet").to_pylist(),
        "lineage": lambda run: pq.read_table(run / "lineage").to_pylist(),
        "lineage_answers": lambda run: pq.read_table(run / "lineage_answers").to_pylist(),
        "checkpoint": checkpoint,
        "model": lambda run: (run / "model" / "model.safetensors").read_bytes(),
        "evaluation": lambda run: (run / "evaluation.json").read_text(),
        "summary": summary,
        "files": names,
    }
    return [f"{name} differs" for name, view in views.items() if not same(view(folder), view(whole))]


def kill(kills: int, seed: int, work: Path, tell: Callable[[str], None] = lambda text: None) -> Outcome:
    """Kills runs so many times, and says what was not as it should be."""
    command = [*overrides(work), "resume=auto"]
    rng, outcome = random.Random(seed), Outcome()
    whole = work / "whole"
    undisturbed = fork([*command, f"hydra.run.dir={whole}"], whole)
    if undisturbed.status:
        raise RuntimeError(f"the undisturbed run failed: {undisturbed.said[-2000:]}")
    tell(f"undisturbed: {undisturbed.seconds:.1f} s, {undisturbed.operations} file operations")
    points: list[int] = []
    while outcome.kills < kills or outcome.runs == 0:
        folder = work / f"run_{outcome.runs:03}"
        arguments, ended = [*command, f"hydra.run.dir={folder}"], None
        outcome.runs += 1
        while ended is None or ended.status == -signal.SIGKILL:
            newest, where, point = newest_step(folder), "not killed", {}
            if outcome.kills < kills:
                if rng.random() < 0.5:
                    points = points or rng.sample(range(undisturbed.operations), undisturbed.operations)
                    point = {"kill_at": points.pop()}
                else:
                    point = {"kill_s": rng.uniform(0, undisturbed.seconds)}
                where = ", ".join(f"{name}={value:.3g}" for name, value in point.items())
            ended = fork(arguments, folder, **point)
            outcome.starts += 1
            outcome.kills += ended.status == -signal.SIGKILL
            fault = went_on(ended, newest)
            if ended.status not in (0, -signal.SIGKILL):
                how = f"hung for {ended.seconds:.0f} s" if ended.status == HUNG else f"ended with {ended.status}"
                fault = f"{how}: {ended.said[-1500:]}"
            if fault:
                outcome.faults.append(f"{folder.name}, {where}: {fault}")
                tell(outcome.faults[-1])
        if ended.status == 0:
            again = fork(arguments, folder)
            found = differences(folder, whole)
            if again.status or "is finished after" not in again.said:
                found.append(f"started once more it ended with {again.status}: {again.said[-1500:]}")
            outcome.faults += [f"{folder.name}: {what}" for what in found]
        tell(f"{folder.name}: {outcome.kills} kills so far, {len(outcome.faults)} faults")
    return outcome


def main() -> int:
    """Prints the outcome; 1 where something was not as it should be."""
    parser = argparse.ArgumentParser(description="Kills runs and looks whether they go on as if nothing had been.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which stays")
    options = parser.parse_args()
    work = options.keep or Path(tempfile.mkdtemp(prefix="kills_"))
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    # Rates measured beside kills are none for the user's runs; threads of Rust's would not survive a fork.
    os.environ |= {"GRPO_RL_CACHE": str(work / "cache"), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.chdir(work)
    _import_all()
    begun = time.monotonic()
    try:
        outcome = kill(options.kills, options.seed, work, lambda text: print(text, flush=True))
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    for fault in outcome.faults:
        print(f"FAULT {fault}")
    print(
        f"{outcome.kills} kills in {outcome.runs} runs of {outcome.starts} starts, {time.monotonic() - begun:.0f} s: "
        f"{len(outcome.faults)} faults"
    )
    return int(bool(outcome.faults))


def _import_all() -> None:
    """Imports what a run does, also on its way: forks have it then."""
    import torch

    torch.set_num_threads(1)
    import pyarrow.parquet
    import scipy.stats
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_rl.monitor.metrics import MetricsLog
    from grpo_rl.report.page import write_report
    from grpo_rl.settings.compose import compose_config
    from grpo_rl.settings.schema import Settings
    from grpo_rl.testing import save_tiny_model

    del pyarrow, scipy
    Settings.read(compose_config("grpo_gsm8k", []))
    with tempfile.TemporaryDirectory() as folder:  # what is imported with the first model and the first chart
        save_tiny_model(folder)
        AutoTokenizer.from_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
        MetricsLog(folder).log(1, {"reward/mean": 1.0})
        write_report(folder)


if __name__ == "__main__":
    sys.exit(main())
