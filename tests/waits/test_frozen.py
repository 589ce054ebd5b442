"""Whatever freezes is named within half a minute of its deadline, while the rest of the process goes on."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from grpo_rl.envs.guards.guard import ScoreGuard
from grpo_rl.envs.guards.isolation import START_TIMEOUT_S
from grpo_rl.envs.task import Reward, Task
from grpo_rl.monitor.loggers import Loggers
from grpo_rl.monitor.phases import start_phase
from grpo_rl.waits.registry import PROCESS
from grpo_rl.waits.watcher import watching

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
        until = time.monotonic() + 60
        while not (folder / "waits.txt").exists() and time.monotonic() < until:
            time.sleep(0.05)
    assert said.seconds < DEADLINE_S + 30
    assert said[0].startswith("Warning. trainer has waited ") and names in said[0], said
    assert names in (folder / "waits.txt").read_text()


class Frozen(Task):
    reward_parts = ("right",)

    def __init__(self, seconds):
        self.rows, self._seconds = [{"question": "?"}], seconds

    def prompt(self, row):
        return [{"role": "user", "content": row["question"]}]

    def score(self, row, response):
        time.sleep(self._seconds)
        return Reward({"right": 1.0})


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
