"""Who waits for whom: a late wait is told once with its name, the table shows all, and SIGUSR1 asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console

from grpo_rl.distributed import ranks as ranks_module
from grpo_rl.distributed.liveness import Watch
from grpo_rl.distributed.meeting import Member
from grpo_rl.monitor.progress import Progress
from grpo_rl.waits import watcher as watcher_module
from grpo_rl.waits.record import read_record, record_path
from grpo_rl.waits.registry import OTHER_RANKS, PROCESS, Waits, waiting
from grpo_rl.waits.table import stacks, table, words
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


def looked_at(waits, folder, said):
    """A watcher that is not running: it looks when it is told to."""
    watcher = Watcher(waits)
    watcher.say, watcher.folder = said.append, folder
    return watcher


def test_a_wait_is_told_once_its_deadline_has_passed_and_again_when_it_has_lasted_twice_as_long(waits, clock, tmp_path):
    said = []
    watcher = looked_at(waits, tmp_path, said)
    with waiting("a checkpoint on the disk", "step 3", deadline_s=100, remedy="look at the disk", waits=waits):
        for clock.now in (50, 100.5, 102, 110, 150):
            watcher._look()
        assert said == [
            "Warning. trainer has waited 102 s for a checkpoint on the disk (step 3), longer than 100 s: look at the "
            f"disk. Who waits for whom: {tmp_path}/waits.txt"
        ]
        clock.now = 205
        watcher._look()
        assert len(said) == 2 and "has waited 205 s" in said[1]
    record = read_record(tmp_path / "waits.txt")
    assert (record.pid, record.role, record.overdue) == (os.getpid(), "trainer", ("a checkpoint on the disk (step 3)",))


def test_a_wait_without_a_deadline_has_the_runs_and_an_infinite_one_is_only_shown(waits, clock, tmp_path):
    said = []
    watcher = looked_at(waits, tmp_path, said)
    with waiting("groups", waits=waits), waiting("the phase train", deadline_s=float("inf"), waits=waits):
        clock.now = 602
        watcher._look()
    assert len(said) == 1 and "has waited 10 min for groups, longer than 10 min" in said[0]
    assert "the phase train" in (tmp_path / "waits.txt").read_text()


def test_a_wait_that_ends_by_an_error_of_its_deadline_is_told_and_signs_of_life_start_the_deadline_anew(
    waits, clock, tmp_path
):
    said = []
    watcher = looked_at(waits, tmp_path, said)
    with pytest.raises(TimeoutError), waiting("engine 0", deadline_s=5, waits=waits) as wait:
        for clock.now in (4, 8, 12):
            wait.again()
            watcher._look()
        clock.now = 17
        raise TimeoutError
    assert not said and not waits.open
    watcher._look()
    watcher._look()
    assert said == [
        "Warning. trainer has waited 5.0 s for engine 0 before it ended, longer than 5.0 s. Who waits for whom: "
        f"{tmp_path}/waits.txt"
    ]


def test_a_wait_may_be_ended_twice(waits, clock, tmp_path):
    said = []
    with waiting("engine 0", deadline_s=5, waits=waits) as wait:
        clock.now = 6
        wait.__exit__()
    assert not waits.open and list(waits.late) == [wait]
    looked_at(waits, tmp_path, said)._look()
    assert len(said) == 1


def test_the_table_has_a_row_for_each_name_with_the_oldest_wait(waits, clock):
    with waiting("responses of engine 0", "group 7", 120, version=4, waits=waits):
        clock.now = 130
        with waiting("responses of engine 0", "group 8", 120, version=5, waits=waits), waiting("groups", waits=waits):
            lines = table(list(waits.open), "rank 1").splitlines()
    line = test_the_table_has_a_row_for_each_name_with_the_oldest_wait.__code__.co_firstlineno + 1
    where = f"tests/waits/test_waits.py:{line} test_the_table_has_a_row_for_each_name_with_the_oldest_wait"
    assert [row.split("  ") for row in (" ".join(line.split()) for line in lines)] == [
        ["role waits for since deadline version where"],
        [f"rank 1 responses of engine 0 (group 7), and 1 more 130 s 120 s passed 4 {where}"],
        [f"rank 1 groups 0.0 s 10 min {where.replace(f':{line} ', f':{line + 2} ')}"],
    ]


def test_stacks_show_threads_and_what_a_coroutine_awaits(waits):
    def blocked_here(gate):
        with waiting("a gate", waits=waits):
            gate.wait()

    async def innermost(gate):
        await gate.wait()

    async def awaits():
        gate = asyncio.Event()

        async def one():
            with waiting("a signal", waits=waits):
                await innermost(gate)

        tasks = [asyncio.create_task(one()) for _ in range(3)]
        await asyncio.sleep(0)
        text = stacks(list(waits.open), "trainer")
        gate.set()
        await asyncio.gather(*tasks)
        return text

    gate = threading.Event()
    thread = threading.Thread(target=blocked_here, args=(gate,), name="scores_0")
    thread.start()
    text = asyncio.run(awaits())
    gate.set()
    thread.join()
    coroutines = text.partition("3 coroutines\n")[2]
    assert [word in coroutines for word in ("in one", "in innermost", "gate.wait()")] == [True] * 3
    assert "blocked_here" in text.partition("scores_0\n")[2].partition("\n\n")[0]
    assert not waits.open


def test_a_coroutine_that_is_abandoned_waits_no_more(waits):
    async def waits_for_ever():
        with waiting("an engine that is gone", waits=waits):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(waits_for_ever())
    task._log_destroy_pending = False
    loop.run_until_complete(asyncio.sleep(0))
    assert [wait.task for wait in waits.open] == [task]
    loop.close()
    del loop, task
    gc.collect()
    assert not waits.open


def test_a_wait_that_ends_while_its_stack_is_read_is_left_out(waits):
    class Ends:
        asked = 0

        @property
        def task(self):
            self.asked += 1
            return self.running if self.asked == 1 else None

    async def sleeps():
        await asyncio.sleep(0)

    async def shown():
        wait = Ends()
        wait.running = asyncio.create_task(sleeps())
        text = stacks([wait], "trainer")
        await wait.running
        return text

    assert "sleeps" in asyncio.run(shown())


def test_a_phase_of_the_trainer_is_shown_at_the_line_of_the_package_that_it_is_at(tmp_path):
    progress = Progress(3, Console(quiet=True))
    released, reached = threading.Event(), threading.Event()

    def train():
        progress.__enter__()
        progress.phase("train")
        progress._record = lambda _: (reached.set(), released.wait(10))
        progress.note("a note that takes long")
        progress.__exit__()

    thread = threading.Thread(target=train, name="training")
    thread.start()
    assert reached.wait(10)
    [wait] = [wait for wait in PROCESS.open if wait.what == "the phase train to end"]
    shown = table([wait], "trainer").splitlines()[1]
    released.set()
    thread.join()
    assert re.search(r"training +the phase train to end \(step 1\) .* grpo_rl/monitor/progress.py:\d+ note$", shown), (
        shown
    )


def test_ranks_that_do_not_join_are_waited_for_under_a_name(monkeypatch):
    found = []

    def nobody_comes(*_):
        found.extend((words(wait), wait.limit_s) for wait in PROCESS.open)
        raise ValueError("1 of 2 ranks did not come")

    monkeypatch.setattr(ranks_module, "meet", nobody_comes)
    with pytest.raises(ValueError, match="did not come"):
        ranks_module.Ranks.join("ddp", rank=1, size=2, store=dist.HashStore(), timeout_s=60)
    assert found == [("all ranks to join (this is rank 1 of 2)", 30.0)]


def test_a_rank_that_waits_and_is_not_late_yet_is_not_named(waits, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(watcher_module, "RANKS_S", 0.0)
    said = {rank: [] for rank in range(3)}
    ranks, own = [], [waits, Waits(clock), Waits(clock)]
    for rank in range(3):
        watcher = looked_at(own[rank], tmp_path, said[rank])
        watcher.rank, watcher.size = rank, 3
        ranks.append(watcher)
    with waiting(OTHER_RANKS, "gather", deadline_s=60, waits=own[1]):
        clock.now = 0.4
        ranks[1]._look()
        assert not record_path(tmp_path, 1).exists(), "most waits for the others are short"
        clock.now = 40
        with waiting(OTHER_RANKS, "gather", deadline_s=60, waits=own[0]):
            clock.now = 41
            ranks[0]._look()
            clock.now = 62
            ranks[1]._write = lambda overdue: None  # its disk hangs
            ranks[1]._look()
    assert read_record(record_path(tmp_path, 0)).with_ranks and not read_record(record_path(tmp_path, 0)).overdue
    assert not said[0] and len(said[1]) == 1
    assert "60 s: rank 2 does not wait for the others; " in said[1][0], "rank 0 has 38 s left, and rank 1 is itself"


def test_the_record_of_a_deadline_that_passed_stays_below_a_later_one(waits, clock, tmp_path):
    watcher = looked_at(waits, tmp_path, [])
    with waiting("a checkpoint on the disk", deadline_s=1, waits=waits):
        clock.now = 3
        watcher._look()
    with waiting("the logger wandb", deadline_s=1, waits=waits):
        clock.now = 6
    watcher._look()
    assert "the logger wandb" in read_record(tmp_path / "waits.txt").overdue
    with waiting("groups of the next step", waits=waits):
        watcher._write([])
    record = read_record(tmp_path / "waits.txt")
    assert not record.overdue and "a checkpoint on the disk" not in record.table
    assert "Overdue: a checkpoint on the disk" in record.text.partition("\n\nA deadline had passed before\n\n")[2]


def test_a_signal_counts_once_however_it_is_heard_and_others_do_not(waits, tmp_path):
    watcher = looked_at(waits, tmp_path, [])
    number, handled = bytes([signal.SIGUSR1]), watcher_module._HANDLED
    heard = [
        (bytes([signal.SIGINT]), False),
        (number + handled, True),
        (number, True),  # the main thread is in a long call
        (bytes([signal.SIGTERM]), False),
        (handled, False),  # it has come out of it
        (handled, True),  # another library hears the numbers
        (number + number, True),
        (number, True),
        (handled + number, True),
    ]
    for what, is_asked in heard:
        os.write(watcher._asks, what)
        assert watcher._is_asked() is is_asked, what


def test_the_watch_over_ranks_passes_signals_on(tmp_path):
    path = tmp_path / "waits.txt"
    with watching(600.0) as watcher, watcher.telling(tmp_path):
        signal.signal(signal.SIGUSR1, lambda *_: None)  # as if the main thread never came to its handler
        watch = Watch(dist.HashStore(), "watch", [Member.here(0)], 0, 60.0, ends_on_sigterm=True)
        watch.start()
        first = path.stat().st_mtime_ns
        os.kill(os.getpid(), signal.SIGUSR1)
        until = time.monotonic() + 20
        while path.stat().st_mtime_ns == first and time.monotonic() < until:
            time.sleep(0.02)
        watch.leave()
        assert path.stat().st_mtime_ns != first


def test_a_rank_that_does_not_wait_for_the_others_is_named_by_the_first_that_does(waits, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(watcher_module, "RANKS_S", 0.0)
    said = {rank: [] for rank in range(3)}
    ranks = []
    for rank in range(3):
        watcher = looked_at(waits, tmp_path, said[rank])
        watcher.rank, watcher.size = rank, 3
        watcher._write([])  # as at the start of a run
        os.utime(record_path(tmp_path, rank), (time.time() - 3600,) * 2)
        ranks.append(watcher)
    with waiting(OTHER_RANKS, "gather", deadline_s=60, waits=waits):
        clock.now = 62
        for rank in (2, 0):  # rank 1 is stopped
            ranks[rank]._look()
    first, last = said[2][0], said[0][0]
    stopped = f"rank 1 (process {os.getpid()} on "
    assert stopped in first and stopped in last and last.startswith("Warning. rank 0 has waited 62 s for the other")
    assert "does not wait for the others" in last and "rank 2" not in last
    ranks[2]._quiet.clear()
    with waiting(OTHER_RANKS, "gather", deadline_s=0, waits=waits):
        clock.now += 2
        ranks[2]._look()
    assert len(said[2]) == 1, "rank 0, which waits too, tells"


ASKED = """
import signal, sys, threading, time
from pathlib import Path
from grpo_rl.waits.registry import waiting
from grpo_rl.waits.watcher import watching
with watching(600.0) as watcher, watcher.telling(Path(sys.argv[1])):
    with waiting("standard input"):
        print("ready", flush=True)
        {blocks}
assert signal.set_wakeup_fd(-1) == -1
signal.raise_signal(signal.SIGUSR1)
assert not [thread for thread in threading.enumerate() if thread.name == "waits"]
print("ended", flush=True)
"""


@pytest.mark.parametrize(
    "blocks",
    [
        "sys.stdin.readline()",
        # A call that does not let the main thread handle signals, as those of a process group.
        "import ctypes; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); "
        "ctypes.CDLL(None).read(0, ctypes.create_string_buffer(1), 1)",
    ],
)
def test_sigusr1_prints_the_table_and_writes_the_stacks_whatever_the_main_thread_does(blocks, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", ASKED.format(blocks=blocks), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "ready\n"
    path = tmp_path / "waits.txt"
    first = read_record(path)
    assert first.renews and "standard input" not in first.text
    os.kill(child.pid, signal.SIGUSR1)
    until = time.monotonic() + 20
    while "standard input" not in path.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    out, err = child.communicate("ab\n", timeout=200)
    assert (out, child.returncode) == ("ended\n", 0)
    assert "trainer  standard input" in err and f"Stacks are in {path}" in err
    record = read_record(path)
    assert 'File "<string>", line' in record.text.partition("\n\nStacks\n")[2]
    assert (record.pid, record.renews, "kill -USR1" in record.text) == (child.pid, False, False)


def test_a_handler_of_sigusr1_that_was_there_before_is_called_and_nobody_is_asked_to_send_it(tmp_path):
    called, path = [], tmp_path / "waits.txt"
    before = signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        with watching(600.0) as watcher, watcher.telling(tmp_path), waiting("a signal"):
            assert not read_record(path).renews
            signal.raise_signal(signal.SIGUSR1)
            until = time.monotonic() + 20
            while "a signal" not in read_record(path).table and time.monotonic() < until:
                time.sleep(0.02)
        assert "a signal" in read_record(path).table and called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_outside_the_main_thread_no_handler_is_installed_and_the_record_says_so(tmp_path):
    def work():
        with watching(600.0) as watcher, watcher.telling(tmp_path):
            assert not read_record(tmp_path / "waits.txt").renews
        done.append(True)

    done = []
    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is before and done
    assert not list(tmp_path.iterdir()), "nothing was late"


def test_an_inner_watcher_is_the_outer_one_and_late_waits_are_told_by_its_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", printed := io.StringIO())
    with waiting("a thing of before", deadline_s=0.0):
        pass  # which nobody watched
    with watching(0.0, poll_s=0.05) as outer, watching(600.0) as inner:
        assert inner is outer
        with inner.telling(tmp_path), waiting("a frozen thing"):
            until = time.monotonic() + 6
            while "frozen" not in (err := printed.getvalue()) and time.monotonic() < until:
                time.sleep(0.05)
        assert "a thing of before" not in err
        assert "trainer has waited" in err and "for a frozen thing, longer than 0.0 s" in err
    assert not [thread for thread in threading.enumerate() if thread.name == "waits"]


def test_a_disk_that_hangs_holds_up_no_warning(waits, clock, tmp_path, monkeypatch):
    hangs, said = threading.Event(), []
    monkeypatch.setattr(watcher_module, "replacing", lambda path: contextlib.nullcontext(hangs.wait() and path))
    watcher = looked_at(waits, tmp_path, said)
    monkeypatch.setattr(watcher_module, "_DISK_S", 0.01)
    with waiting("a checkpoint on the disk", deadline_s=1, waits=waits):
        clock.now = 3
        watcher._look()
    [text] = said
    assert "trainer  a checkpoint on the disk" in text, "it has the table, as the file does not"
    hangs.set()


def test_a_log_that_hangs_holds_up_neither_the_next_warning_nor_the_end_of_the_run(waits, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(watcher_module, "_DISK_S", 0.01)
    hangs, shown = threading.Event(), []
    progress = Progress(3, Console(file=io.StringIO()), record=lambda _: hangs.wait())
    monkeypatch.setattr(progress, "_print_plain", shown.append)
    watcher = looked_at(waits, tmp_path, [])
    begun = time.monotonic()
    with watcher.telling(tmp_path), watcher.saying(progress.note):
        for what in ("a checkpoint on the disk", "the logger wandb"):
            with waiting(what, deadline_s=1, waits=waits):
                clock.now += 3
                watcher._look()
    assert time.monotonic() - begun < 30
    assert ["a checkpoint" in shown[0], "the logger wandb" in shown[1]] == [True, True]
    with watcher._looking:  # another thread looks, and does not come to an end
        with watcher.telling(tmp_path), watcher.saying(progress.note):
            pass
    hangs.set()
    assert time.monotonic() - begun < 30


def test_what_is_late_at_the_end_is_said_before_the_logs_are_closed_and_never_later(waits, clock, tmp_path, capsys):
    said = []
    watcher = looked_at(waits, tmp_path, [])
    with watcher.telling(tmp_path), watcher.saying(said.append):
        with waiting("the last step", deadline_s=1, waits=waits):
            clock.now = 3
    assert len(said) == 1 and "for the last step before it ended" in said[0]
    with waiting("a logger that closes", deadline_s=1, waits=waits):
        clock.now = 6
    watcher._look()
    assert len(said) == 1 and "a logger that closes" in capsys.readouterr().err


def test_what_fails_while_it_is_told_does_not_end_the_run(waits, clock, tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("dictionary changed size")

    monkeypatch.setattr(watcher_module, "role_of", fails)
    watcher = looked_at(waits, tmp_path, [])
    with watcher.telling(tmp_path), waiting("the last step", deadline_s=1, waits=waits):
        clock.now = 3
    assert "Waits can't be told (RuntimeError: dictionary changed size)" in capsys.readouterr().err


def test_what_fails_in_a_thread_that_helps_to_tell_is_said_too(waits, clock, tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("no stack")

    monkeypatch.setattr(watcher_module, "stacks", fails)
    said = []
    with looked_at(waits, None, said).telling(tmp_path), waiting("the last step", deadline_s=1, waits=waits):
        clock.now = 3
    assert len(said) == 1 and "for the last step" in said[0]
    assert f"{tmp_path}/waits.txt can't be written (RuntimeError: no stack)" in capsys.readouterr().err
    monkeypatch.undo()
    watcher = looked_at(waits, None, [])
    watcher.say = fails
    with watcher.telling(tmp_path), waiting("the last step", deadline_s=1, waits=waits):
        clock.now = 6
    assert "Waits can't be told (RuntimeError: no stack)" in capsys.readouterr().err


def test_a_record_holds_whatever_a_name_has_in_it(waits, tmp_path):
    with waiting("reading the data of \ud800 über", waits=waits), looked_at(waits, None, []).telling(tmp_path):
        assert "reading the data of \\ud800 über" in read_record(tmp_path / "waits.txt").table


def test_a_wait_costs_less_than_20_us_of_cpu_time(tmp_path):
    def seconds(count=20_000):
        begun = time.thread_time()
        for _ in range(count):
            with waiting("responses of engine 0", deadline_s=120.0):
                pass
        return (time.thread_time() - begun) / count

    with watching(600.0):
        assert min(seconds() for _ in range(5)) < 20e-6


def test_the_folder_of_a_missing_record_says_none(tmp_path):
    (tmp_path / "waits.txt").write_text("something else")
    assert read_record(tmp_path / "waits.txt") is None and read_record(Path("no/such")) is None
