"""A late wait is logged once with its name, with a table of all waits, and SIGUSR1 prints the stacks of all threads."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from grpo_rl.waits import Waits, Watcher, waiting


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


@pytest.fixture
def waits(clock):
    waits = Waits(lambda: clock.now)
    waits.default_s = 600.0
    return waits


def test_a_wait_is_logged_once_its_deadline_has_passed_and_again_when_it_has_lasted_twice_as_long(
    waits, clock, tmp_path
):
    watcher, said = Watcher(waits), []  # not running: it looks when it is told to
    with (
        watcher.telling(tmp_path),
        watcher.saying(said.append),
        waiting("a checkpoint on the disk", "step 3", deadline_s=100, remedy="look at the disk", waits=waits),
    ):
        for clock.now in (50, 100.5):
            watcher._look()
        assert not said and not list(tmp_path.iterdir()), "a run that is well has no file"
        for clock.now in (102, 110, 150):
            watcher._look()
        assert said == [
            "Warning. trainer has waited 102 s for a checkpoint on the disk (step 3), longer than 100 s: look at the "
            f"disk. All waits: {tmp_path}/waits.txt"
        ]
        clock.now = 205
        watcher._look()
        assert len(said) == 2 and "has waited 205 s" in said[1]
        with waiting("groups", waits=waits) as wait:
            clock.now += 599
            wait.again()  # a sign of life
            clock.now += 599
            watcher._look()
            assert not [line for line in said if "groups" in line]
            clock.now += 3
            watcher._look()
        assert "has waited 10 min for groups, longer than 10 min" in said[-1], "the default deadline"
    text = (tmp_path / "waits.txt").read_text()
    assert text.startswith(f"Process {os.getpid()} on ") and "trainer  a checkpoint on the disk (step 3)" in text
    assert "test_waits.py" in text.partition("Stacks")[2]


def test_each_rank_writes_a_file_of_its_own_and_a_start_removes_that_of_the_start_before(waits, clock, tmp_path):
    (tmp_path / "waits.rank1.txt").write_text("of before")
    watcher = Watcher(waits)
    watcher.say = lambda _: None
    with watcher.telling(tmp_path, 1, 2):
        assert not list(tmp_path.iterdir())
        with waiting("the other ranks \ud800", deadline_s=1, waits=waits):
            clock.now = 3
            watcher._look()
    assert "rank 1  the other ranks \\ud800" in (tmp_path / "waits.rank1.txt").read_text()


BLOCKED = """
import ctypes, signal, subprocess, sys
from pathlib import Path
from grpo_rl.waits import waiting, watching
with watching(0.0, poll_s=0.05) as watcher, watcher.telling(Path(sys.argv[1])), waiting("a frozen thing"):
    ctypes.CDLL(None).fgetc(ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stdin"))  # does not return to Python
signal.raise_signal(signal.SIGUSR1)  # one that comes after the run
"""


def test_while_the_main_thread_is_blocked_late_waits_are_logged_and_sigusr1_prints_the_stacks(tmp_path):
    command, pipe = [sys.executable, "-c", BLOCKED, str(tmp_path)], subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True)
    assert "trainer has waited" in (line := child.stderr.readline()) and "for a frozen thing, longer than 0.0" in line
    os.kill(child.pid, signal.SIGUSR1)
    _, err = child.communicate("a", timeout=200)
    assert child.returncode == 0 and 'File "<string>", line' in err
