"""Runs that are killed and started again by one fixed command: a short form of `make test-faults`, and its parts."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.training.checkpoint import checkpoints, load, save

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parent
NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and cc")


@NEEDS_LINUX
def test_runs_that_are_killed_go_on_as_if_nothing_had_been_and_a_planted_difference_is_found(tmp_path, script):
    command = [sys.executable, str(FOLDER / "kills.py"), "--kills", "20", "--jobs", "1", "--keep", str(tmp_path)]
    done = subprocess.run([*command, "--modes", "sync", "async"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith(": 0 faults") and int(last.split()[0]) >= 20
    # Threads shift the numbers of points, so a kind that was aimed at may be another.
    kinds = {line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| sync | ")}
    assert kinds <= set(script("kill_points").KINDS) and len(kinds) >= 3

    outcome, whole, other = script("outcome"), tmp_path / "whole sync", tmp_path / "other"
    shutil.copytree(whole, other)
    assert outcome.compared(other, whole) == []
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
    lost = [f"lost: group of the completions {group}" for group in (2, 3)]
    assert outcome.counted(other) == ["doubled: step 3", *lost]


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
