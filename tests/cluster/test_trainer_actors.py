"""Trainers in actors: they meet, what they return and how they end comes back, and a dead one is named."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

ray = pytest.importorskip("ray")

import torch.distributed as dist  # noqa: E402

from grpo_rl.cluster.nodes import places  # noqa: E402
from grpo_rl.cluster.trainer_actors import run_trainers  # noqa: E402
from grpo_rl.waits.registry import PROCESS  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors don't import tests
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def trained(work, count=2):
    with places([{"CPU": 1}] * count) as place:
        return run_trainers(work, count, place, num_cpus=1, num_gpus=0)


def add_up(rendezvous):
    dist.init_process_group("gloo", store=rendezvous.store(), rank=rendezvous.rank, world_size=rendezvous.size)
    everyone = [None] * rendezvous.size
    dist.all_gather_object(everyone, os.getpid())
    return rendezvous.rank, everyone


@pytest.mark.slow
def test_ranks_meet_and_the_first_ones_result_comes_back():
    rank, pids = trained(add_up)
    assert rank == 0 and len({*pids, os.getpid()}) == 3


@pytest.mark.nightly
def test_a_run_that_stops_by_itself_stops_the_script_with_its_words_and_what_waits_for_it_has_names(monkeypatch):
    names, wait = [], ray.wait

    def recorded(*arguments, **named):
        names.extend(open_wait.what for open_wait in PROCESS.open)
        return wait(*arguments, **named)

    def stop(rendezvous):
        raise SystemExit("Stopped after step 3. Go on with: resume=outputs/x")

    with pytest.raises(SystemExit, match="Stopped after step 3. Go on with: resume=outputs/x"):
        monkeypatch.setattr(ray, "wait", recorded)
        trained(stop, count=1)
    assert list(dict.fromkeys(names)) == [
        "all trainers to have a place",
        "the trainers to end",
        "rank zero to write what is to be kept",
    ]
    assert not PROCESS.open


@pytest.mark.nightly
def test_one_that_dies_is_told_though_the_others_wait_for_it():
    def die(rendezvous):
        if rendezvous.rank == 1:
            os._exit(1)
        time.sleep(600)

    with pytest.raises(RuntimeError, match=r"the trainer on [\d.]+ died: .* go on with resume="):
        trained(die)


@pytest.mark.nightly
def test_a_trainer_that_is_killed_is_started_again_with_all_others_and_finds_what_they_left():
    def work(rendezvous):
        store = rendezvous.store()
        if rendezvous.start == 0:
            store.set(f"pid {rendezvous.rank}", str(os.getpid()))
            store.get("pid 1")
            if rendezvous.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return rendezvous, [int(store.get(f"pid {rank}")) for rank in range(2)], os.getpid()

    with places([{"CPU": 1}] * 2) as place:
        rendezvous, before, now = run_trainers(work, 2, place, num_cpus=1, num_gpus=0, max_restarts=1)
    assert (rendezvous.rank, rendezvous.size, rendezvous.start) == (0, 2, 1)
    assert len({*before, now, os.getpid()}) == 4
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before), "a process of the first start is still there"


@pytest.mark.nightly
def test_what_rank_0_says_last_is_told_and_not_what_the_others_said_first():
    def stop(rendezvous):
        if rendezvous.rank == 0:
            time.sleep(1.0)  # it writes a report
        raise SystemExit(f"Stopped. Go on with: resume=folder-of-rank-{rendezvous.rank}")

    with pytest.raises(SystemExit, match="resume=folder-of-rank-0"):
        trained(stop)


@pytest.mark.nightly
def test_an_error_keeps_its_words():
    def fail(rendezvous):
        raise ZeroDivisionError("of rank 0")

    with pytest.raises(ZeroDivisionError, match="of rank 0"):
        trained(fail, count=1)


@pytest.mark.nightly
def test_ctrl_c_is_passed_on_and_the_run_may_finish_its_step(tmp_path):
    listens = tmp_path / "listens"

    def work(rendezvous):
        asked = []
        signal.signal(signal.SIGINT, lambda *_: asked.append(1))
        listens.touch()
        end = time.monotonic() + 60
        while not asked and time.monotonic() < end:
            time.sleep(0.05)
        raise SystemExit("stopped" if asked else "was never asked")

    def interrupt():
        while not listens.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(SystemExit, match="stopped"):
        trained(work, count=1)
