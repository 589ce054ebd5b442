"""Trainers in actors: they meet, what they return and how they end comes back, and a dead one is named."""

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
from grpo_rl.waits import PROCESS  # noqa: E402


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


def stops(rendezvous):
    if rendezvous.rank == 0:
        time.sleep(1.0)  # it writes a report
    raise SystemExit(f"Stopped after step 3. Go on with: resume=folder-of-rank-{rendezvous.rank}")


def dies(rendezvous):
    if rendezvous.rank == 1:
        os._exit(1)
    time.sleep(600)


def fails(rendezvous):
    raise ZeroDivisionError("of rank 0")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("work", "count", "error", "told"),
    [
        (stops, 2, SystemExit, "^Stopped after step 3. Go on with: resume=folder-of-rank-0$"),
        (dies, 2, RuntimeError, r"the trainer on [\d.]+ died: .* go on with resume="),
        (fails, 1, ZeroDivisionError, "of rank 0"),
    ],
)
def test_how_trainers_end_comes_back_in_their_words_and_waits_have_names(monkeypatch, work, count, error, told):
    names, wait = [], ray.wait

    def recorded(*arguments, **named):
        names.extend(open_wait.what for open_wait in PROCESS.open)
        return wait(*arguments, **named)

    monkeypatch.setattr(ray, "wait", recorded)
    with pytest.raises(error, match=told):
        trained(work, count)
    assert names[0] == "all trainers to have a place" and "the trainers to end" in names and not PROCESS.open
    assert work is not stops or names[-1] == "rank zero to write what is to be kept"


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
