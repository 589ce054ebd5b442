import importlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from grpo_rl.envs.guards.isolation import IsolatedCalls, WorkerDied

pytestmark = pytest.mark.slow

CASES = """
import os, signal, sys, time

def act(what, value=None):
    if what == "double":
        return 2 * value
    if what == "sleep":
        time.sleep(value)
        return "slept"
    if what == "spin":
        return pow(10, 10**10)  # one C call that holds the interpreter's lock for hours
    if what == "raise":
        raise value
    if what == "exit":
        os._exit(value)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "crash once":
        if not os.path.exists(value):
            open(value, "w").close()
            os._exit(1)
        return "survived"
    if what == "take GiB":
        return len(bytearray(int(value * 2**30)))
    if what == "pid":
        return os.getpid()
    if what == "imported":
        return value in sys.modules
    if what == "child":
        child = os.fork()
        if not child:
            time.sleep(1000)
        with open(value, "w") as file:
            file.write(str(child))
        time.sleep(1000)
    if what == "leave a child":
        if not os.fork():
            time.sleep(60)
        os._exit(value)
    if what == "unpicklable":
        return lambda: None
    if what == "odd":
        raise Odd(1, 2)

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")  # so that it can be pickled, but not read again
"""


@pytest.fixture
def act(written_module):
    """A function of a module that only this test's search path leads to."""
    return importlib.import_module(written_module("isolated_cases", CASES)).act


def ended(process_id: int, within_s: float = 10.0) -> bool:
    """True if a process is gone, or dead and only not yet reaped, before the time is over."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("hang", [("sleep", 1000), ("spin",)])
def test_a_call_that_hangs_costs_its_own_result_only(act, hang):
    with IsolatedCalls(act, workers=2, deadline_s=2.0) as calls:
        # The first takes longest: results come in the order of the arguments.
        first, *results, late = calls.map([("sleep", 0.5), *[("double", n) for n in range(40)], hang])
    assert (first, results) == ("slept", list(range(0, 80, 2)))
    assert isinstance(late, TimeoutError) and "2 s" in str(late)


@pytest.mark.alone
def test_calls_for_which_no_time_is_left_are_not_made(act):
    with IsolatedCalls(act, workers=1, deadline_s=5.0) as calls:
        calls.start()
        start = time.monotonic()
        results = calls.map([("double", 1), ("sleep", 1000), ("double", 3)], budget_s=1.0)
        assert time.monotonic() - start < 3
        assert results[0] == 2 and [type(result) for result in results[1:]] == [TimeoutError] * 2
        assert calls.map([("double", 4)]) == [8]


@pytest.mark.parametrize(
    ("crash", "end"),
    [
        (("exit", 3), "exit code 3"),
        (("crash",), "SIGSEGV"),
        (("leave a child", 4), "exit code 4"),  # which holds the worker's end of the pipe
    ],
)
def test_a_call_that_ends_its_process_is_named_and_costs_its_own_result_only(act, crash, end):
    with IsolatedCalls(act, workers=1, deadline_s=60) as calls:
        first, died, last = calls.map([("double", 1), crash, ("double", 3)])
    assert (first, last) == (2, 6)
    assert isinstance(died, WorkerDied) and end in str(died)


def test_a_worker_that_dies_once_or_while_it_waits_is_replaced_unseen(act, tmp_path):
    with IsolatedCalls(act, workers=1) as calls:
        assert "torch" in sys.modules  # here, and not in a worker
        assert calls.map([("imported", "isolated_cases"), ("imported", "torch")]) == [True, False]
        assert calls.map([("double", 1), ("crash once", str(tmp_path / "mark")), ("double", 3)]) == [2, "survived", 6]
        [worker] = calls.map([("pid",)])
        os.kill(worker, 9)
        assert ended(worker)
        assert calls.map([("double", 1), ("double", 2)]) == [2, 4]


def test_what_a_call_raises_takes_the_place_of_its_result(act):
    with IsolatedCalls(act, workers=1) as calls:
        error, odd, lost, fine = calls.map([("raise", KeyError("gold")), ("odd",), ("unpicklable",), ("double", 1)])
    assert isinstance(error, KeyError) and error.args == ("gold",)
    assert isinstance(odd, RuntimeError) and re.fullmatch(r"Odd: 1 and 2 \(.*isolated_cases\.py, line \d+\)", str(odd))
    assert isinstance(lost, Exception) and "lambda" in str(lost)
    assert fine == 2


@pytest.mark.skipif(sys.platform != "linux", reason="memory limits are Linux's")
def test_a_call_that_takes_too_much_memory_gets_a_memory_error(act):
    with IsolatedCalls(act, workers=1, memory_gib=0.25) as calls:
        small, large, after = calls.map([("take GiB", 0.1), ("take GiB", 1), ("double", 1)])
    assert small == int(0.1 * 2**30) and isinstance(large, MemoryError) and after == 2


def test_any_thread_may_call_and_several_at_the_same_time(act):
    with IsolatedCalls(act, workers=2) as calls, ThreadPoolExecutor(8) as threads:
        results = threads.map(lambda n: calls.map([("double", n)] * 30), range(8))
        assert list(results) == [[2 * n] * 30 for n in range(8)]


def test_close_ends_the_workers_and_calls_after_it_are_refused(act):
    calls = IsolatedCalls(act, workers=2)
    workers = set(calls.map([("pid",)] * 20))
    calls.close()
    assert all(ended(worker, within_s=0.1) for worker in workers)
    with pytest.raises(RuntimeError, match="after shutdown"):
        calls.map([("double", 1)])
    calls.close()


def test_the_thread_that_reads_a_pipe_alone_closes_it(act, monkeypatch):
    closers, close = [], Connection.close
    monkeypatch.setattr(
        Connection, "close", lambda pipe: closers.append(threading.current_thread().name) or close(pipe)
    )
    calls = IsolatedCalls(act, deadline_s=600)
    under_way = calls.submit(("sleep", 600))
    while not calls._live:
        time.sleep(0.01)
    calls.close(now=True)
    with pytest.raises(RuntimeError, match="closed while|can't be started"):
        under_way.result(60)
    assert closers and all(name.startswith("isolated-calls") for name in closers)


@pytest.mark.skipif(sys.platform != "linux", reason="groups are killed everywhere, /proc is Linux's")
def test_a_killed_call_takes_its_children_with_it(act, tmp_path):
    with IsolatedCalls(act, workers=1, deadline_s=3) as calls:
        [result] = calls.map([("child", str(tmp_path / "child"))])
    assert isinstance(result, TimeoutError)
    assert ended(int((tmp_path / "child").read_text()))


SCRIPT = """
import sys, threading, time
sys.path.insert(0, {folder!r})
print("main script runs", flush=True)
from isolated_cases import act
from grpo_rl.envs.guards.isolation import IsolatedCalls

calls = IsolatedCalls(act, workers=1, deadline_s=1000)
print(calls.map([("pid",)])[0], flush=True)
{rest}
"""


def run(folder: Path, rest: str) -> subprocess.Popen:
    # On purpose without `if __name__ == "__main__"`.
    (folder / "script.py").write_text(SCRIPT.format(folder=str(folder), rest=textwrap.dedent(rest)))
    return subprocess.Popen([sys.executable, str(folder / "script.py")], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("rest", ["", "raise SystemExit(0)", "1 / 0", "calls.map([('double', 1)] * 50)"])
def test_nothing_is_left_behind_when_the_program_ends_and_the_main_script_runs_once(act, tmp_path, rest):
    script = run(tmp_path, rest)
    lines = script.communicate(timeout=200)[0].split("\n")
    assert lines[0] == "main script runs" and len(lines) == 3
    assert ended(int(lines[1]))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker that hangs outlives a killed parent")
@pytest.mark.parametrize("hang", ["('sleep', 1000)", "('spin',)"])
def test_nothing_is_left_behind_when_the_program_is_killed_while_a_call_hangs(act, tmp_path, hang):
    script = run(tmp_path, f"calls.map([{hang}])")
    assert script.stdout
    script.stdout.readline()
    worker = int(script.stdout.readline())
    time.sleep(0.5)  # the call is under way
    assert not ended(worker, within_s=0.1)
    script.kill()
    script.communicate()
    assert ended(worker)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_is_told_to_make_its_own_and_does_not_end_its_parents_workers(act):
    with IsolatedCalls(act, workers=1) as calls:
        [worker] = calls.map([("pid",)])
        child = os.fork()
        if not child:
            try:
                calls.map([("double", 1)])
            except RuntimeError as error:
                calls._finalizer()
                os._exit(7 if "make others here" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert calls.map([("pid",)]) == [worker]
