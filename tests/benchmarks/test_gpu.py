"""Rows of gpu.py run one by one, each in a process that its limit ends; what they gave is written after each."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROWS = """
import os, subprocess, sys, time
from gpu_rows import NotAvailable

def good(place):
    print("good says hello")
    yield "seconds", 3.0
    yield "rate", 2.0 if "slow" not in place.measured else place.measured["slow"]["first"]

def slow(place):
    yield "first", 1.0
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (place.folder / "child").write_text(str(child.pid))
    yield "second", 2.0
    time.sleep(600)

def broken(place):
    yield "seconds", 3.0
    raise ValueError("no such model\\nin two lines")

def killed(place):
    yield "seconds", 3.0
    os._exit(9)

def refused(place):
    raise NotAvailable("needs two GPUs")
    yield
"""


@pytest.fixture
def rows(script, tmp_path, monkeypatch):
    """Functions of rows in a module that another process can import."""
    (tmp_path / "some_rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    script("gpu_rows")
    return script("some_rows")


@pytest.fixture
def place(script, tmp_path):
    return script("gpu_rows").Place(toy=True, device="cpu", folder=tmp_path)


@pytest.fixture
def forked(script, monkeypatch, capfd):
    """Rows that start as forks, which need no imports of their own."""
    gpu = script("gpu")
    measure = gpu.measure

    def uncaptured(*args):
        with capfd.disabled():  # a fork would print to pytest, and not into its log
            return measure(*args)

    monkeypatch.setattr(gpu, "START", "fork")
    monkeypatch.setattr(gpu, "measure", uncaptured)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_row_is_imported_and_run_by_a_new_process(script, rows, place, tmp_path):
    good = script("gpu").measure(rows.good, place, 60, log := tmp_path / "row.log")
    assert (good.figures, good.ended, good.failed) == ({"seconds": 3.0, "rate": 2.0}, None, False)
    assert log.read_text() == "good says hello\n"


@pytest.mark.usefixtures("forked")
def test_a_row_that_fails_or_is_refused_or_dies_says_so_and_keeps_the_figures_it_has(script, rows, place, tmp_path):
    measure, log = script("gpu").measure, tmp_path / "row.log"
    broken = measure(rows.broken, place, 60, log)
    assert (broken.figures, broken.ended, broken.failed) == ({"seconds": 3.0}, "ValueError: no such model", True)
    assert "Traceback" in log.read_text()
    killed = measure(rows.killed, place, 60, log)
    assert (killed.figures, killed.failed) == ({"seconds": 3.0}, True) and "exit code 9" in killed.ended
    refused = measure(rows.refused, place, 60, log)
    assert (refused.figures, refused.ended, refused.failed) == ({}, "needs two GPUs", False)
    at_full_size = measure(rows.refused, dataclasses.replace(place, toy=False), 60, log)
    assert (at_full_size.ended, at_full_size.failed) == ("needs two GPUs", True)


@pytest.mark.usefixtures("forked")
def test_a_row_over_its_limit_is_ended_with_all_that_it_started(script, rows, place, tmp_path):
    outcome = script("gpu").measure(rows.slow, place, 5, tmp_path / "row.log")
    assert outcome.figures == {"first": 1.0, "second": 2.0}
    assert outcome.failed and outcome.ended == "over its limit of 5 s"
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_alive(child)


@pytest.mark.usefixtures("forked")
def test_the_file_is_written_after_each_row_and_later_rows_see_what_earlier_ones_measured(
    script, rows, place, tmp_path, monkeypatch
):
    gpu = script("gpu")
    bar = gpu.Bar("rate", at_least=2.0)
    table = {"slow": gpu.Row(rows.slow, 5, ()), "good": gpu.Row(rows.good, 60, (bar,))}
    out, states, printed = tmp_path / "new" / "gpu.json", [], []
    write = gpu.write

    def written(*args):
        write(*args)
        states.append(sorted(json.loads(out.read_text())["rows"]))

    monkeypatch.setattr(gpu, "write", written)
    monkeypatch.setattr(gpu, "print", lambda text, **_: printed.append(text), raising=False)
    gpu.run(table, place, out, limit_s=5 + 60 + gpu.GRACE_S + 1)
    assert states == [["slow"], ["good", "slow"]]
    found = json.loads(out.read_text())["rows"]
    assert found["slow"]["ended"] == "over its limit of 6 s"
    # What `slow` measured first is 1.0, below the bar.
    assert found["good"]["bars"] == [{"what": "rate", "bar": "at least 2", "figure": 1.0, "verdict": "missed"}]
    assert (tmp_path / "new" / "gpu_good.log").read_text() == "good says hello\n"
    assert "missed" in printed[-1]


def test_all_rows_and_the_end_of_their_processes_fit_into_the_minutes(script):
    gpu = script("gpu")
    limits_s = sum(row.limit_s for row in gpu.ROWS.values())
    assert limits_s + gpu.GRACE_S <= 60 * gpu.MINUTES
    assert list(gpu.ROWS)[:2] == ["quickstart", "async"], "their rates are compared"
