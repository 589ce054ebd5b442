"""Runs that are killed and started again by one fixed command: a short form of `make test-faults`, and its parts."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.training.checkpoint import checkpoints, load, save

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parent
NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and cc")


@NEEDS_LINUX
@pytest.mark.parametrize(("kills", "modes"), [(6, ["sync"]), (20, ["sync", "async"])])
def test_runs_that_are_killed_go_on_as_if_nothing_had_been_and_a_planted_difference_is_found(
    tmp_path, script, kills, modes
):
    command = [sys.executable, str(FOLDER / "kills.py"), "--kills", str(kills), "--jobs", "1", "--keep", str(tmp_path)]
    done = subprocess.run([*command, "--modes", *modes], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith(": 0 faults") and int(last.split()[0]) >= kills
    # Threads shift the numbers of points, so a kind that was aimed at may be another.
    kinds = {line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| sync | ")}
    assert kinds <= set(script("kill_points").KINDS)
    assert len(kinds) >= 3 or kills < 20

    outcome, whole, other = script("outcome"), tmp_path / "whole sync", tmp_path / "other"
    shutil.copytree(whole, other)
    assert outcome.differences(other, whole) == [] and outcome.counted(other) == ([], [])
    with (other / "metrics.jsonl").open("a") as metrics:
        metrics.write((other / "metrics.jsonl").read_text().splitlines()[-2] + "\n")  # the last step twice
    path = checkpoints(other / "checkpoints")[-1]
    state = copy.deepcopy(load(path))
    next(iter(state["optimizer"]["masters"].values())).view(-1)[0] += 1e-6
    save(path.parent, 3, state, keep=0)
    (other / "completions.parquet" / "part-00000002.parquet").unlink()
    (other / "evaluation.json").write_text(json.dumps({"step": 3, "rewards": []}))
    found = ["metrics differs", "completions differs", "checkpoint differs", "evaluation differs", "files differs"]
    assert outcome.differences(other, whole) == found
    lost = ["group of the completions 2", "group of the completions 3"]
    assert outcome.counted(other) == (lost, ["step 3"])


ARMED = """
import sys
from pathlib import Path
import numpy, pyarrow, pyarrow.parquet
from safetensors.numpy import save_file
from kill_points import arm
work = Path(sys.argv[1])
arm(work / "run", int(sys.argv[2]), work / "tally", work / "witness")
(work / "elsewhere").write_text("not a point")
with open(work / "run" / "text", "wb", buffering=0) as file:
    file.write(b"abcdefgh")
pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), work / "run" / "arrow")
save_file({"a": numpy.zeros(1)}, work / "run" / "tensors")
"""


@NEEDS_LINUX
def test_every_librarys_writes_are_points_and_a_torn_write_leaves_half_and_a_witness(tmp_path, script, monkeypatch):
    points = script("kill_points")
    (tmp_path / "run").mkdir()
    library = points.compiled(tmp_path)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    subprocess.run([sys.executable, "-c", ARMED, str(tmp_path), "-1"], check=True)
    passed = [(point.kind, Path(point.path).name) for point in points.points(tmp_path / "tally")]
    assert passed[:3] == [("open", "text"), ("write", "text"), ("torn write", "text")]
    assert {("open", "arrow"), ("torn write", "arrow")} <= set(passed)
    assert any(kind == "torn write" and name.startswith((".tmp", "tensors")) for kind, name in passed)  # of safetensors
    assert "elsewhere" not in {name for _, name in passed} and not points.points(tmp_path / "witness")

    died = subprocess.run([sys.executable, "-c", ARMED, str(tmp_path), "2"])
    assert died.returncode == -signal.SIGKILL
    assert points.points(tmp_path / "witness") == [points.Point(2, "torn write", str(tmp_path / "run" / "text"))]
    assert (tmp_path / "run" / "text").read_bytes() == b"abcd"


def test_a_start_that_begins_before_the_newest_checkpoint_is_a_fault(script):
    began_wrongly = script("outcome").began_wrongly
    said = "Resumed after step 2 from checkpoint_000002.pt"
    assert began_wrongly(said, 0, 2) is None
    assert began_wrongly(said, 0, 3) == "went on from [2], the newest checkpoint being of step 3"
    assert began_wrongly("", 0, 1).startswith("went on from the beginning")
    assert began_wrongly("", -9, 1) is None


def test_a_start_that_hangs_is_a_fault_and_no_kill(script, tmp_path, monkeypatch):
    starts = script("starts")
    monkeypatch.setattr(starts, "PATIENCE_S", 0.2)
    monkeypatch.setattr(starts, "_be_the_run", lambda *_: (os.setsid(), time.sleep(60)))
    hung = starts.start(starts.MODES["two ranks"], [], tmp_path / "run")
    assert hung.status == starts.HUNG


def test_a_campaign_counts_kills_with_a_witness_and_fails_for_too_few_of_them_or_one_loss(script):
    kills, starts = script("kills"), script("starts")
    found, point = kills.Campaign(), starts.Point(3, "fsync", "x")
    ends = [starts.Start(-signal.SIGKILL, 1.0, "", died_at) for died_at in (point, point, None)]
    kinds = [kills.note_kill(found, "sync", end, at) for end, at in zip(ends, (3, 4, 3), strict=True)]
    assert kinds == ["fsync", kills.UNSEEN, kills.UNSEEN]  # another one's, or at another point
    assert "| sync | fsync | 1 | 1 |" in kills.table(found) and f"| {kills.UNSEEN} | 2 | 0 |" in kills.table(found)
    assert found.failed(2) and not found.failed(1)
    for name in kills.BAD:
        lossy = kills.Campaign()
        lossy.add(found)
        lossy.counts["sync", "fsync", name] += 1
        assert lossy.failed(1)
    found.faults.append("x")
    assert found.failed(1)


def test_an_async_run_is_compared_in_all_that_does_not_depend_on_its_batches(script, tmp_path):
    certain = script("outcome").certain

    def of_run(name, version=3, weight=(1.0, 2.0)):
        optimizer = {"masters": {"w": torch.tensor(weight)}, "optimizer": {"state": {0: {}}}, "counters": [3, 0, 0]}
        state = {"step": 3, "version": version, "collected": 24, "optimizer": optimizer}
        MetricsLog(tmp_path / name).log(3, {"total/responses": 24})
        save(tmp_path / name / "checkpoints", 3, state)
        return certain(tmp_path / name)

    whole = of_run("whole")
    assert of_run("other weights", weight=(3.0, 4.0)) == whole
    assert of_run("a push more", version=4) != whole and of_run("a shape", weight=(1.0,)) != whole
    assert of_run("no number", weight=(1.0, math.nan))["not finite"] == ["w"]
