"""`grpo-rl status` says in a line what a run is, and what was late in it."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from grpo_rl.cli import main
from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.report.files import SUMMARY
from grpo_rl.run import claim
from grpo_rl.run.lock import LOCK, FolderLock

RUN = """
import sys
from pathlib import Path
from grpo_rl.run.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path):
    now = time.time()
    row = json.dumps({"step": 7, "time": now - 90, "reward/mean": 0.5})
    (tmp_path / METRICS_FILE).write_text(f"{row}\n" + '{"step": 8, "ti')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now)  # or a busy machine would say 91 s
        yield tmp_path


@pytest.fixture
def live(run):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}  # the child ends with this process
    child = subprocess.Popen([sys.executable, "-c", RUN, str(run)], **pipes, text=True)
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.communicate()


def ask(run, capsys, *options):
    code = main(["status", str(run), *options])
    return code, capsys.readouterr().out.rstrip("\n")


def test_a_lock_and_metrics_of_elsewhere_are_shown_without_what_a_terminal_would_obey(tmp_path, capsys):
    held = {"pid": 1, "host": "\x1b[2J\x1b]0;title\x07n1\u202e", "since": "api_key=abc"}
    (tmp_path / LOCK).write_text(json.dumps(held))
    rows = [{"step": 3, "time": "noon"}, {"step": [4]}, {"step": 5, "time": 10**400}]
    for row in rows:
        (tmp_path / METRICS_FILE).write_text(f"{json.dumps(row)}\n" + "[" * 5000 + "\n")
        code, said = ask(tmp_path, capsys)
        assert said.startswith("Perhaps alive, as process 1 on n1: ") and code == 0 and said.isprintable()


def test_a_live_run_is_alive_and_the_waits_that_were_late_are_shown(run, live, capsys):
    code, said = ask(run, capsys)
    assert code == 0 and said.startswith(f"Alive: process {live.pid} on {socket.gethostname()} since ")
    assert f", step 7, 90 s ago. kill -USR1 {live.pid} prints the stacks" in said
    (run / "waits.txt").write_text("trainer  groups of the next step\n\nStacks\n\nThread 1")
    code, said = ask(run, capsys)
    assert said.endswith(f".\n\ntrainer  groups of the next step\n\nStacks are in {run}/waits.txt")


def test_a_run_that_was_killed_is_dead_and_one_that_ended_is_stopped_or_finished(run, live, capsys):
    live.kill()
    live.wait()
    code, said = ask(run, capsys)
    assert code == 1 and said.startswith(f"Dead, once process {live.pid} on ")
    assert said.endswith(f"step 7, 90 s ago. Go on with: resume={run}.")
    FolderLock(run).close()
    assert ask(run, capsys) == (1, f"Stopped: step 7, 90 s ago. Go on with: resume={run}")
    (run / SUMMARY).write_text('{"finished": true}')
    assert ask(run, capsys)[0] == 1, "its model is not written yet"
    (run / claim.MODEL).mkdir()
    assert ask(run, capsys) == (0, "Finished: step 7, 90 s ago.")


def test_a_run_whose_process_may_be_there_is_not_called_dead(run, capsys):
    """On another host, and where locks do not work."""
    for pid, host in ((12, "node7"), (os.getpid(), socket.gethostname())):
        (run / LOCK).write_text(json.dumps({"pid": pid, "host": host, "since": "2026"}))
        code, said = ask(run, capsys)
        assert code == 0 and said.startswith("Perhaps alive") and f"process {pid} on {host}" in said


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
