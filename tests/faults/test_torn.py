"""Damaged files of a run are not taken for good: a short form of `make test-faults`, and tests of its parts."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parent


def test_no_damaged_file_is_taken_for_good_and_the_checkpoint_before_is_taken():
    command = [sys.executable, str(FOLDER / "torn.py"), "--count", "64", "--finish-every", "20"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("64 damaged runs") and ": 0 faults" in done.stdout
    for kind in ("checkpoint", "shards"):
        assert f"| {kind} |{' 4 |' * 5}" in done.stdout
    for kind in ("metrics", "log", "evaluation"):
        assert f"| {kind} | 4 | 0 | 0 | 4 | 0 |" in done.stdout


def test_a_damage_that_is_taken_in_silence_is_a_fault(script, tmp_path):
    is_told, file = script("torn").is_told, tmp_path / "tokens.parquet" / "part-00000003.parquet"
    said = f"passed over: {tmp_path}/checkpoints/checkpoint_000003.pt: {file} is gone\nresume=x: going on"
    assert is_told("log", "missing", 2, file, said) and not is_told("log", "missing", 2, file, "")
    assert not is_told("checkpoint", "cut off", 2, file, "")
    assert not is_told("log", "cut off", 2, file, said.replace("000003.parquet", "000002.parquet"))
    assert not is_told("metrics", "cut off", None, file, f"resume={tmp_path}: no checkpoint can be used")
    assert not is_told("metrics", "cut off", None, file, f"{tmp_path} has 0.0 GiB free, and {file} needs more")
