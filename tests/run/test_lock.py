"""The lock of a run's folder: who writes there, who comes second, and what outlives whom."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from unittest.mock import MagicMock

import pytest

from grpo_rl.run.lock import LOCK, FolderInUseError, FolderLock


def test_the_error_of_the_second_writer_names_the_first_one(tmp_path):
    lock = FolderLock(tmp_path)
    holder = re.escape(f"process {os.getpid()} on {socket.gethostname()} since ")
    for _ in range(2):  # and being refused takes nothing from the first
        with pytest.raises(FolderInUseError, match=holder + r"\d{4}-\d\d-\d\d .*wait for it, or set another"):
            FolderLock(tmp_path)
    lock.close()
    again = FolderLock(tmp_path)
    assert again.warning is None
    again.close()


@pytest.mark.parametrize("how", ["moved", "removed", "another's"])
def test_a_folder_that_was_moved_or_removed_is_noticed(tmp_path, how):
    folder = tmp_path / "run"
    lock = FolderLock(folder)
    assert not lock.is_lost()
    folder.rename(tmp_path / "elsewhere")
    if how == "another's":
        FolderLock(folder).close()
    elif how == "removed":
        shutil.rmtree(tmp_path / "elsewhere")
    assert lock.is_lost()
    lock.close()


def test_a_killed_process_lets_go_and_what_it_started_does_not_hold_the_folder(tmp_path):
    """A program that it executed, and a process that it forked, both outlive it."""
    script = """
import os, subprocess, sys, time
from pathlib import Path
from grpo_rl.run.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
executed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
ready, let_go = os.pipe()
if not (forked := os.fork()):
    os.write(let_go, b".")
    time.sleep(60)
os.read(ready, 1)  # it has let go
print(executed.pid, forked, flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    outlive = [int(pid) for pid in child.stdout.readline().split()]
    try:
        with pytest.raises(FolderInUseError, match=f"process {child.pid} on "):
            FolderLock(tmp_path)
        child.kill()
        child.wait()
        FolderLock(tmp_path).close()
        for pid in outlive:
            os.kill(pid, 0)  # they are there
    finally:
        for pid in outlive:
            os.kill(pid, signal.SIGKILL)


def test_a_folder_left_by_another_host_and_a_file_system_without_locks_are_reported(tmp_path, monkeypatch):
    (tmp_path / LOCK).write_text(json.dumps({"pid": 7, "host": "elsewhere", "since": "2026-01-31 12:00:00+00:00"}))
    lock = FolderLock(tmp_path)
    assert "process 7 on elsewhere since 2026-01-31 12:00:00+00:00" in lock.warning
    lock.close()
    monkeypatch.setattr(fcntl, "flock", MagicMock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    lock = FolderLock(tmp_path)
    assert "has no locks (No locks available)" in lock.warning
    lock.close()
