"""A late wait is logged once with its name, with a table of all waits, and SIGUSR1 prints the stacks of all threads."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from grpo_rl.distributed import ranks as ranks_module
from grpo_rl.waits.registry import PROCESS, Waits, waiting
from grpo_rl.waits.watcher import Watcher, watching


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def waits(clock):
    waits = Waits(clock)
    waits.default_s = 600.0
    return waits


@pytest.fixture
def said():
    return []


@pytest.fixture
def watcher(waits, said, tmp_path):
    """A watcher that is not running: it looks when it is told to."""
    watcher = Watcher(waits)
    with watcher.telling(tmp_path), watcher.saying(said.append):
        yield watcher


def test_a_wait_is_logged_once_its_deadline_has_passed_and_again_when_it_has_lasted_twice_as_long(
    watcher, waits, clock, said, tmp_path
):
    with waiting("a checkpoint on the disk", "step 3", deadline_s=100, remedy="look at the disk", waits=waits):
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
    text = (tmp_path / "waits.txt").read_text()
    assert text.startswith(f"Process {os.getpid()} on ") and "trainer  a checkpoint on the disk (step 3)  205 s" in text
    assert "test_waits.py" in text.partition("Stacks")[2]


def test_a_wait_without_a_deadline_has_the_runs_and_an_infinite_one_is_only_shown(
    watcher, waits, clock, said, tmp_path
):
    with waiting("groups", waits=waits), waiting("the phase train", deadline_s=float("inf"), waits=waits):
        clock.now = 602
        watcher._look()
    assert len(said) == 1 and "has waited 10 min for groups, longer than 10 min" in said[0]
    assert "the phase train" in (tmp_path / "waits.txt").read_text()


def test_signs_of_life_start_the_deadline_anew_and_a_wait_may_be_ended_twice(watcher, waits, clock, said):
    with waiting("engine 0", deadline_s=5, waits=waits) as wait:
        for clock.now in (4, 8, 12):
            wait.again()
            watcher._look()
        wait.__exit__()
    assert not said and not waits.open


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


def test_ranks_that_do_not_join_are_waited_for_under_a_name(monkeypatch):
    found = []

    def nobody_comes(*_):
        found.extend((str(wait), wait.limit_s) for wait in PROCESS.open)
        raise ValueError("1 of 2 ranks did not come")

    monkeypatch.setattr(ranks_module, "meet", nobody_comes)
    with pytest.raises(ValueError, match="did not come"):
        ranks_module.Ranks.join("ddp", rank=1, size=2, store=dist.HashStore(), timeout_s=60)
    assert found == [("all ranks to join (this is rank 1 of 2)", 30.0)]


ASKED = """
import signal, subprocess, sys
from pathlib import Path
from grpo_rl.waits.watcher import watching
with watching(600.0) as watcher, watcher.telling(Path(sys.argv[1])):
    print("ready", flush=True)
    {blocks}
signal.raise_signal(signal.SIGUSR1)  # one that comes after the run
asks = "import signal; print(signal.getsignal(signal.SIGUSR1).name)"
started = subprocess.run([sys.executable, "-c", asks], stdout=subprocess.PIPE)
print("ended", started.stdout.decode().strip(), flush=True)
"""


@pytest.mark.parametrize(
    "blocks",
    [
        "sys.stdin.readline()",
        # A call that does not return to Python, as those of a process group.
        "import ctypes; ctypes.CDLL(None).fgetc(ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'stdin'))",
    ],
)
def test_sigusr1_prints_the_stacks_whatever_the_main_thread_does(blocks, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", ASKED.format(blocks=blocks), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGUSR1)
    out, err = child.communicate("ab\n", timeout=200)
    assert (out, child.returncode) == ("ended SIG_DFL\n", 0) and 'File "<string>", line' in err
    assert not list(tmp_path.iterdir())


def test_an_inner_watcher_is_the_outer_one_and_late_waits_are_logged_by_its_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", printed := io.StringIO())
    with watching(0.0, poll_s=0.05) as outer, watching(600.0) as inner:
        assert inner is outer
        with inner.telling(tmp_path), waiting("a frozen thing"):
            until = time.monotonic() + 60
            while "frozen" not in (err := printed.getvalue()) and time.monotonic() < until:
                time.sleep(0.05)
        assert "trainer has waited" in err and "for a frozen thing, longer than 0.0 s" in err
    assert not [thread for thread in threading.enumerate() if thread.name == "waits"]
