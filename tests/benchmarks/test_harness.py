"""The common parts of all benchmarks: limits, memory, arms, the headline; and that `make bench` runs every script."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

SCRIPTS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_examples_of_every_script_are_right(script, name, capsys):
    assert doctest.testmod(script(name)).failed == 0, capsys.readouterr().out


def test_make_bench_runs_every_script_that_measures(script):
    measuring = {f"{name}.py" for name in SCRIPTS if hasattr(script(name), "NAME")}
    assert {run[0] for run in script("run_all").RUNS.values()} == measuring


def test_a_benchmark_that_fails_does_not_stop_the_others(script, tmp_path):
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "good.py").write_text("import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write(sys.argv[1])")
    runs = {"first": ("bad.py",), "second": ("good.py", "7")}
    assert script("run_all").run_all(runs, tmp_path, force=True) == ["first"]
    assert (tmp_path / "second.json").read_text() == "7" and not (tmp_path / "first.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_what_is_held_at_once_not_what_is_left(script):
    harness = script("harness")
    program = """
import torch
from harness import peak_above

def work():
    first = torch.ones(2**24)  # 64 MiB
    second = first + 1
    del first
    return second + 1

print(peak_above(work))
"""
    folder = Path(harness.__file__).parent
    child = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert 120 < int(child.stdout) / 2**20 < 140


def test_an_arm_that_fails_says_why(script):
    harness, head = script("harness"), script("head")
    with pytest.raises(harness.ArmError, match="broken failed:(.|\n)*KeyError: 'no such head'"):
        harness.Arm("broken", head.arm, "no such head", head.Shape(2, 2, 2, 1.0), False, "cpu")


def test_an_arm_that_was_killed_between_its_steps_says_so(script):
    harness, head = script("harness"), script("head")
    arm = harness.Arm("killed", head.arm, head.OURS, head.Shape(2, 2, 2, 1.0), False, "cpu")
    arm.step()
    arm._process.kill()
    arm._process.join()
    with pytest.raises(harness.ArmError, match="killed ended with exit code -9"):
        arm.step()
