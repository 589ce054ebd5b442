"""Ranks that are killed, frozen, late or broken are named by the others, which end in time and with their own code.

`python tests/distributed/test_liveness.py FOLDER` has two ranks, in processes that talk over gloo, for each of these.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_rl.distributed.liveness import LOST_CODE, Member, RankLostError, Stopped, Watch
from grpo_rl.distributed.ranks import Ranks, meet

DEADLINE_S, TIMEOUT_S, AT = 2.0, 6.0, 5
FAULTS = ("killed", "stopped", "stopped zero", "late", "broken", "in order", "killed zero")


def be_rank(folder: Path, fault: str, rank: int) -> None:
    """Exchanges with the other rank, until the one with the fault has it in exchange ``AT``."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store {fault}"), 2)
    with Ranks.join("ddp", "cpu", rank, 2, store, timeout_s=TIMEOUT_S, deadline_s=DEADLINE_S) as ranks:
        assert ranks.watch
        ranks.watch.doing = lambda: "phase train of step 3"
        for i in range(AT):
            assert ranks.gather(i) == [i, i]
        time.sleep(DEADLINE_S / 4)  # as signs of life are told ten times in a deadline
        if rank == (not fault.endswith("zero")):
            (folder / f"fault {fault}").write_text(str(time.time()))
            match fault:
                case "killed" | "killed zero":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stopped" | "stopped zero":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "late":
                    time.sleep(60)
                case "broken":
                    raise ZeroDivisionError("of rank 1")
        if fault == "killed zero":
            try:
                while True:
                    time.sleep(0.01)
            finally:
                print("closed", file=sys.stderr, flush=True)
        if fault == "in order":
            raise Stopped("Stopped after step 3")
        ranks.gather("a" * (rank + 1))


def fork_ranks(folder: Path, fault: str) -> dict[str, Any]:
    """The end of both ranks: wait status, seconds since the fault, and what they said; a stopped one is killed then."""
    pids = []
    for rank in range(2):
        if not (pid := os.fork()):
            os.dup2(os.open(folder / f"{fault} {rank}", os.O_WRONLY | os.O_CREAT), 2)
            code: Any = 1
            try:
                be_rank(folder, fault, rank)
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        pids.append(pid)
    ended: dict[int, tuple[int, float]] = {}
    stopped, began = None, time.monotonic()
    while len(ended) < 2 - (stopped is not None) and time.monotonic() < began + 60:
        for rank, pid in enumerate(pids):
            if rank not in ended:
                found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
                if found and os.WIFSTOPPED(status):
                    stopped = rank
                elif found:
                    ended[rank] = os.waitstatus_to_exitcode(status), time.time()
        time.sleep(0.02)
    for rank, pid in enumerate(pids):
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    at = folder / f"fault {fault}"
    since = float(at.read_text()) if at.exists() else 0.0
    return {
        "pids": pids,
        "stopped": stopped,
        "codes": {str(rank): code for rank, (code, _) in ended.items()},
        "seconds": {str(rank): when - since for rank, (_, when) in ended.items()},
        "said": [(folder / f"{fault} {rank}").read_text() for rank in range(2)],
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("liveness")
    subprocess.run([sys.executable, __file__, str(folder)], check=True, timeout=500)
    return json.loads((folder / "found.json").read_text())


def error_line(found: dict[str, Any], rank: int) -> str:
    """The one line that a rank has said."""
    (line,) = [line for line in found["said"][rank].splitlines() if "[W" not in line]
    return line


def test_a_killed_rank_is_named_at_once(found):
    killed = found["killed"]
    assert killed["codes"] == {"0": LOST_CODE, "1": -signal.SIGKILL}
    assert killed["seconds"]["0"] < 30  # long before the longest wait
    assert re.fullmatch(
        rf"error: rank 1 \(\S+, process {killed['pids'][1]}\) died in phase train of step 3 since \d\d:\d\d:\d\d"
        rf"(, in the exchange `\w+` since [\d:]+)?\. The others end, with exit code {LOST_CODE}\.",
        error_line(killed, 0),
    )


def test_a_rank_that_is_in_no_exchange_unwinds_when_another_is_lost(found):
    alone = found["killed zero"]
    assert alone["codes"] == {"0": -signal.SIGKILL, "1": LOST_CODE} and alone["seconds"]["1"] < 30
    message, closed = [line for line in alone["said"][1].splitlines() if "[W" not in line]
    assert message.startswith("error: rank 0 (") and closed == "closed"


def test_a_rank_that_unwinds_from_an_exchange_is_not_interrupted_again():
    watch = Watch(dist.HashStore(), "watch", [Member.here(0)], 0, DEADLINE_S)
    try:
        watch._lost.set()
        with pytest.raises(RankLostError), watch.exchange("sum"):
            pass
        watch._on_lost()  # the signal's handler
    finally:
        watch.leave()


@pytest.mark.parametrize(("fault", "rank"), [("stopped", 1), ("stopped zero", 0)])
def test_a_frozen_rank_is_named_within_the_deadline(found, fault, rank):
    stopped = found[fault]
    assert stopped["stopped"] == rank, "it was not frozen"
    assert stopped["codes"] == {str(1 - rank): LOST_CODE}
    assert DEADLINE_S < stopped["seconds"][str(1 - rank)] < DEADLINE_S + 20
    line = error_line(stopped, 1 - rank)
    assert f"rank {rank} (" in line and f"process {stopped['pids'][rank]}) has given no sign of life for 2 s" in line
    assert "in phase train of step 3 since" in line


def test_a_rank_that_lives_and_does_not_come_is_named_after_the_longest_wait(found):
    late = found["late"]
    assert late["codes"]["0"] == LOST_CODE and TIMEOUT_S < late["seconds"]["0"] < TIMEOUT_S + 20
    assert re.search(
        r"rank 1 \(.*\) did not come to the exchange `gather`, in which others have waited since [\d:]+; it is in "
        "phase train of step 3 since",
        error_line(late, 0),
    )


def test_a_rank_that_fails_keeps_its_own_error_and_the_others_name_it(found):
    broken = found["broken"]
    assert broken["codes"] == {"0": LOST_CODE, "1": 1}
    assert broken["said"][1].splitlines()[-1] == "ZeroDivisionError: of rank 1"
    line = error_line(broken, 0)
    assert "rank 1 (" in line and ") ended with ZeroDivisionError: of rank 1, in" in line


def test_ranks_that_stop_in_order_log_nothing_of_each_other(found):
    assert found["in order"]["codes"] == {"0": 1, "1": 1} and found["in order"]["said"] == ["", ""]


def test_ranks_meet_under_another_name_at_each_start_whoever_comes_first_and_whatever_was_left():
    store, names = dist.HashStore(), []
    for first in (0, 1, 1):
        with ThreadPoolExecutor() as threads:
            early = threads.submit(meet, store, first, 2, 30.0)
            time.sleep(0.3)  # rank 1 finds the call of the start before, and its answer
            name = threads.submit(meet, store, 1 - first, 2, 30.0).result()
            assert early.result() == name
            names.append(name)
    assert len({*names}) == 3


def test_a_rank_that_never_comes_to_the_meeting_is_named():
    with pytest.raises(ValueError, match=r"2 of 3 ranks did not come within 0.2 s: rank 1, rank 2"):
        meet(dist.HashStore(), 0, 3, 0.2)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "found.json").write_text(json.dumps({fault: fork_ranks(folder, fault) for fault in FAULTS}))
