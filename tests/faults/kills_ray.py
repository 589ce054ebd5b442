"""Kills async runs on Ray at random moments, starts them again until they finish, and says what was lost or doubled.

    python tests/faults/kills_ray.py --target driver --kills 3
    python tests/faults/kills_ray.py --target engine --kills 3

A tiny random model on this machine, with one vLLM in a Ray actor; a start takes half a minute. ``driver`` is the script
itself, whose end has to be that of all it started; ``engine`` is the actor alone, which the run has to replace.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from outcome import counted

from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.testing import left_if_killed, tiny_run

ROOT = Path(__file__).resolve().parents[2]
MARK = "GRPO_RL_KILLS"
RUN = "outputs/run"  # where resume=auto looks
GROUPS, REPEATS = 4, 4
"""A step has so many groups, and a group so many responses."""
ENGINE = "ray::_EngineActor"
AGENTS_S = 60.0
"""Seconds that Ray's agents may live on after their raylet."""
LATEST_S = {"driver": 70.0, "engine": 15.0}
"""Seconds from a start, or from the kill before, to the latest kill: a start of the driver takes half a minute."""
START_S = 300.0
"""Seconds in which a start has to get anywhere."""


@dataclass
class Started:
    """The script in a process of its own, and what it had in shared memory."""

    process: subprocess.Popen
    mark: str
    shared: set[str] = field(default_factory=set)

    def processes(self) -> list[psutil.Process]:
        """The script's living processes, itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def look(self) -> None:
        """Notes which files in /dev/shm would stay."""
        for process in self.processes():
            try:
                self.shared |= left_if_killed(process.pid)
            except OSError:
                continue

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Waits; whether the condition came true before the script ended or the time was over."""
        end = time.monotonic() + timeout_s
        while not until():
            if self.process.poll() is not None or time.monotonic() > end:
                return False
            self.look()
            time.sleep(0.1)
        return True


def overrides(folder: Path, steps: int) -> list[str]:
    """The settings of a run of so many tiny steps, started in the folder."""
    return [
        *tiny_run(folder),
        f"hydra.run.dir={folder / RUN}",
        "resume=auto",
        f"env.num_envs={GROUPS}",
        f"env.repeats={REPEATS}",
        f"train.optim_batch_size={GROUPS * REPEATS}",
        f"train.total_dialog_turns={steps * GROUPS * REPEATS}",
        "train.checkpoint_frequency=2",
        "train.keep_checkpoints=2",
        "train.lineage=true",
        "inference_model.engine=vllm",
        "inference_model.max_restarts=100",
    ]


def start(arguments: list[str], log: Path) -> Started:
    """Starts the script in a process of its own."""
    mark = uuid.uuid4().hex
    with open(log, "a") as out:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "sota" / "grpo_async.py"), *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark},
            cwd=log.parent,
        )
    return Started(process, mark)


def killed(target: str, kills: int, steps: int, moments: random.Random, folder: Path) -> tuple[int, list[str]]:
    """Kills a run at most ``kills`` times; the number of kills before it finished, and what was wrong with it.

    Args:
        target: ``driver``, or ``engine``.
    """
    wrong, done = [], 0
    arguments, log, run = overrides(folder, steps), folder / "log", folder / RUN
    while True:
        started = start(arguments, log)
        while done < kills and started.process.poll() is None:
            moment = moments.uniform(0.0, LATEST_S[target])
            started.wait(lambda: False, moment)
            if target == "engine" and not started.wait(functools.partial(_has_engine, started), START_S):
                break
            for victim in engines(started) if target == "engine" else [started.process]:
                if started.process.poll() is None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        victim.kill()
                        done += 1
                        at = f"{moment:.1f} s on, after step {len(trained(run))}"
                        print(f"kill {done} of the {target}, {at}", flush=True)
            if target == "driver":
                break
        code = wait_for(started)
        wrong += left(started)
        if code == -9:
            continue
        if code:
            wrong.append(f"it ended with {code}: {log.read_text()[-2000:]}")
        lost, doubled = counted(run, steps, GROUPS)
        return done, [*wrong, *(f"lost: {what}" for what in lost), *(f"twice: {what}" for what in doubled)]


def engines(started: Started) -> list[psutil.Process]:
    """The engines' actors that are alive."""
    found = []
    for process in started.processes():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(ENGINE[:15]):
                found.append(process)
    return found


def _has_engine(started: Started) -> bool:
    return bool(engines(started))


def wait_for(started: Started) -> int:
    """The exit code."""
    if not started.wait(lambda: False, START_S) and started.process.poll() is None:
        alive = started.processes()
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        raise SystemExit(f"it hangs; its processes were {alive}")
    return started.process.wait()


def trained(run: Path) -> list[dict]:
    """The logged row of each step."""
    return [row for row in read_metrics(run) if "groups/started" in row] if (run / "metrics.jsonl").exists() else []


def left(started: Started) -> list[str]:
    """Processes that live on, and files in /dev/shm that were theirs."""
    end = time.monotonic() + AGENTS_S
    while (alive := started.processes()) and time.monotonic() < end:
        time.sleep(0.5)
    files = [name for name in sorted(started.shared) if os.path.exists(f"/dev/shm/{name}")]
    return [f"process {p.pid} ({p.name()}) lives on" for p in alive] + [f"/dev/shm/{name} is left" for name in files]


def main() -> None:
    """Prints what is wrong, and ends with 1 where something is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=["driver", "engine"], default="driver")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    moments, done, runs, wrong = random.Random(given.seed), 0, 0, []
    while done < given.kills and not wrong:
        with tempfile.TemporaryDirectory() as folder:
            made, wrong = killed(given.target, given.kills - done, given.steps, moments, Path(folder))
        done, runs = done + made, runs + 1
    told = f"{done} kills of the {given.target} in {runs} runs: "
    print(told + ("\n".join(wrong) or "nothing lost, doubled or left"), flush=True)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
