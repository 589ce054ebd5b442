"""Runs that are killed and started again by one fixed command, in a short form of benchmarks/kills.py."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_rl.training.checkpoint import checkpoints, load, save

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"


@pytest.mark.nightly
@pytest.mark.slow
def test_runs_that_are_killed_go_on_as_if_nothing_had_been_and_a_planted_difference_is_found(tmp_path, script):
    command = [sys.executable, str(SCRIPT), "--kills", "4", "--seed", "1", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout and "0 faults" in done.stdout

    kills, whole, other = script("kills"), tmp_path / "whole", tmp_path / "other"
    shutil.copytree(whole, other)
    assert kills.differences(other, whole) == []
    with (other / "metrics.jsonl").open("a") as metrics:
        metrics.write((other / "metrics.jsonl").read_text().splitlines()[-1] + "\n")  # the last evaluation twice
    path = checkpoints(other / "checkpoints")[-1]
    state = copy.deepcopy(load(path))
    next(iter(state["optimizer"]["masters"].values())).view(-1)[0] += 1e-6
    save(path.parent, 3, state, keep=0)
    (other / "completions.parquet" / "part-00000002.parquet").unlink()
    (other / "evaluation.json").write_text(json.dumps({"step": 3, "rewards": []}))
    found = ["metrics differs", "completions differs", "checkpoint differs", "evaluation differs", "files differs"]
    assert kills.differences(other, whole) == found


def test_a_start_that_begins_before_the_newest_checkpoint_is_a_fault(script):
    kills = script("kills")
    start = kills.Start(0, 1.0, 0, "Resumed after step 2 from checkpoint_000002.pt")
    assert kills.went_on(start, 2) is None
    assert kills.went_on(start, 3) == "went on from [2], the newest checkpoint being of step 3"
    assert kills.went_on(kills.Start(0, 1.0, 0, ""), 1).startswith("went on from the beginning")
    assert kills.went_on(kills.Start(-9, 1.0, 0, ""), 1) is None


def test_a_start_that_hangs_is_a_fault_and_no_kill(script, tmp_path, monkeypatch):
    kills = script("kills")
    monkeypatch.setattr(kills, "PATIENCE_S", 0.2)
    monkeypatch.setattr(kills, "_be_the_run", lambda *_: (os.setsid(), time.sleep(60)))
    (tmp_path / "run.log").touch()
    assert kills.fork([], tmp_path / "run").status == kills.HUNG
    assert kills.fork([], tmp_path / "run", kill_s=0.1).status == -signal.SIGKILL

    statuses = [0, kills.HUNG, -signal.SIGKILL, 1]  # the undisturbed run; then one that hangs, and one that is killed
    starts = iter([kills.Start(status, 600.0, 5, "") for status in statuses])
    monkeypatch.setattr(kills, "fork", lambda *_, **__: next(starts))
    monkeypatch.setattr(kills, "overrides", lambda _: [])
    outcome = kills.kill(1, 0, tmp_path)
    assert outcome.kills == 1 and "hung for 600 s" in outcome.faults[0]
