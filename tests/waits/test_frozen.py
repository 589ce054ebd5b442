"""Whatever freezes is named within half a minute of its deadline, while the rest of the process goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from grpo_rl.engines.base import EngineDeadError
from grpo_rl.envs.guards.guard import ScoreGuard
from grpo_rl.envs.guards.isolation import START_TIMEOUT_S
from grpo_rl.envs.task import Reward, Task
from grpo_rl.monitor.loggers import Loggers
from grpo_rl.monitor.phases import start_phase
from grpo_rl.waits.record import read_record
from grpo_rl.waits.registry import PROCESS
from grpo_rl.waits.watcher import watching
from grpo_rl.weights.remote import RemoteTransport

DEADLINE_S = 0.2


class Said(list):
    """Warnings, and the seconds after which the first one came."""

    def __init__(self):
        super().__init__()
        self.begun, self.came, self.seconds = time.monotonic(), threading.Event(), None

    def __call__(self, text):
        self.append(text)
        if not self.came.is_set():
            self.seconds = time.monotonic() - self.begun
            self.came.set()


@contextmanager
def told(folder, names):
    """Lets the block freeze until a warning has come, then checks that it names this and that the table has it."""
    with watching(DEADLINE_S) as watcher, watcher.telling(folder):
        watcher.say = said = Said()
        yield said
        assert said.came.wait(60)
    assert said.seconds < DEADLINE_S + 30
    assert said[0].startswith("Warning. trainer has waited ") and names in said[0], said
    record = read_record(folder / "waits.txt")
    assert any(names in late for late in record.overdue) and names in record.table


class Frozen(Task):
    reward_parts = ("right",)

    def __init__(self, seconds):
        self.rows, self._seconds = [{"question": "?"}], seconds

    def prompt(self, row):
        return [{"role": "user", "content": row["question"]}]

    def score(self, row, response):
        time.sleep(self._seconds)
        return Reward({"right": 1.0})


@pytest.mark.slow
def test_a_frozen_scorer(tmp_path):
    with told(tmp_path, "the scorer Frozen (row 5)"):
        guard = ScoreGuard(Frozen(3.0), DEADLINE_S, max_failed_fraction=1.0)
        guard.tell = lambda _: None
        [failure] = guard.score({}, ["4"], "row 5")
        assert failure.kind == "timeout"


def test_the_start_of_a_scorers_own_process_is_not_told_as_its_slowness():
    guard, limits = ScoreGuard(Frozen(0.0), DEADLINE_S), []
    guard._processes = SimpleNamespace(
        map=lambda calls, on_result: limits.extend(wait.limit_s for wait in PROCESS.open) or [Reward({"right": 1.0})]
    )
    guard.score({}, ["4"], "row 5")
    assert limits == [DEADLINE_S + START_TIMEOUT_S]


@pytest.mark.slow
def test_a_frozen_logger(tmp_path):
    class WandB:
        def log(self, step, metrics):
            said.came.wait(60)

    with told(tmp_path, "the logger wandb (step 3)") as said:
        loggers = Loggers(print)
        loggers.add("wandb", WandB())
        loggers.log(3, {"reward/mean": 0.5})
    assert "logger.mode=offline" in said[0]


@pytest.mark.slow
def test_a_frozen_data_loader(tmp_path):
    with told(tmp_path, "reading the data of gsm8k") as said, start_phase("reading the data of gsm8k", print):
        said.came.wait(60)


class Transport(RemoteTransport):
    def send(self, weights, version):
        raise NotImplementedError

    def close(self):
        pass


def test_a_frozen_engine_in_a_push(tmp_path):
    kind = {"dtype": "bfloat16", "takes_adapters": False, "proves_bytes": False}
    engines = [SimpleNamespace(name=f"engine {i}", submit=lambda *_: Future(), **kind) for i in range(2)]
    first = Future()
    engines[0].submit = lambda *_: first
    threading.Timer(DEADLINE_S / 2, first.set_result, [None]).start()
    with (
        told(tmp_path, "engine 1 (a pause for new weights)") as said,
        pytest.raises(EngineDeadError, match="engine 1 did not"),
    ):
        Transport(engines, DEADLINE_S).call("pause", what="a pause for new weights")
    assert "has waited 0.2 s" in said[0] and "longer than 0.2 s" in said[0], "one deadline for all of them"


RANKS = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from grpo_rl.distributed.ranks import Ranks
from grpo_rl.waits.watcher import watching

def pair(folder, frozen):
    os.setsid()
    rank = int(os.fork() == 0)
    ranks = Ranks.join("ddp", rank=rank, size=2, store=dist.FileStore(str(folder / "store"), 2), timeout_s=60.0)
    ranks.told_after_s = 1.0
    with watching(600.0) as watcher, watcher.telling(folder, rank, 2):
        ranks.gather(None)
        if rank == frozen:
            (folder / "frozen").write_text(str(os.getpid()))
            time.sleep(60)
        begun = time.monotonic()
        def say(text):
            (folder / "said").write_text(f"{time.monotonic() - begun:.1f} {text}")
            os.kill(0, signal.SIGKILL)
        watcher.say = say
        ranks.gather("never")

pairs = []
for frozen in (0, 1):  # forks before any thread is there: what is imported is imported once
    folder = Path(sys.argv[1], str(frozen))
    folder.mkdir()
    if not (child := os.fork()):
        pair(folder, frozen)
    pairs.append(child)
for child in pairs:
    os.waitpid(child, 0)
"""


@pytest.mark.nightly  # test_waits.py has its parts
def test_a_frozen_rank(tmp_path):
    subprocess.run([sys.executable, "-c", RANKS, str(tmp_path)], timeout=400)
    for frozen in (0, 1):
        pid = (tmp_path / str(frozen) / "frozen").read_text()
        seconds, text = (tmp_path / str(frozen) / "said").read_text().split(" ", 1)
        assert float(seconds) < 1.0 + 5
        assert f"rank {1 - frozen} has waited " in text and "for the other ranks (gather), longer than 1.0 s" in text
        assert f": rank {frozen} (process {pid} on " in text and "does not wait for the others" in text
