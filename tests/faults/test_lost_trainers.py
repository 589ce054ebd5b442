"""Trainers as Ray's actors: a frozen one is named by the others, killed, and all start again."""

from __future__ import annotations

import logging
import os
import signal
import sys

import pytest

ray = pytest.importorskip("ray")

from grpo_rl.cluster.nodes import places  # noqa: E402
from grpo_rl.cluster.trainer_actors import run_trainers  # noqa: E402
from grpo_rl.distributed.ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors don't import tests
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def work(rendezvous):
    store = rendezvous.store()
    with Ranks.join("ddp", "cpu", rendezvous.rank, rendezvous.size, store, 60.0, deadline_s=2.0) as ranks:
        if rendezvous.start == 0 and rendezvous.rank == 1:
            store.set("frozen", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return rendezvous.start, ranks.gather(os.getpid()), int(store.get("frozen"))


@pytest.mark.nightly  # tests/cluster/test_trainer_actors.py kills one, tests/distributed/test_liveness.py freezes one
def test_a_frozen_trainer_is_named_and_killed_and_all_start_again(caplog):
    with caplog.at_level(logging.WARNING), places([{"CPU": 1}] * 2) as place:
        start, pids, frozen = run_trainers(work, 2, place, num_cpus=1, num_gpus=0, max_restarts=1)
    assert start == 1 and len({*pids, frozen}) == 3
    assert not os.path.exists(f"/proc/{frozen}")
    (said,) = [record.getMessage() for record in caplog.records if "start again" in record.getMessage()]
    assert "rank 1 (" in said and f"process {frozen})" in said and "All trainers start again, 1 of 1 times" in said
