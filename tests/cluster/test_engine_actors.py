"""Engines in Ray actors answer as in this process, and a death is noticed, named and outlived."""

import asyncio
import functools
import ipaddress
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo_rl.cluster.fleet import Fleet
from grpo_rl.engines.base import EngineDeadError, Samples, Sampling
from grpo_rl.engines.loop_thread import EngineLostError, EngineStartError

ray = pytest.importorskip("ray")

import psutil  # noqa: E402

from grpo_rl.cluster import nodes as ray_cluster  # noqa: E402
from grpo_rl.cluster.engine_actors import launch  # noqa: E402


class Engine:
    """Answers with the numbers from 0 on."""

    dtype, max_model_len, takes_adapters, proves_bytes, version = torch.bfloat16, 64, False, False, 0
    deadline_s = 1.0

    def __init__(self, broken=False):
        if broken:
            raise OSError("no memory")
        self.pids, self.hangs = [os.getpid()], False

    async def generate(self, request_id, prompt, n, sampling):
        self.hangs = prompt == [14]
        if self.hangs:
            await asyncio.sleep(600)
        if prompt == [13]:
            os._exit(1)
        if not prompt:
            raise ValueError("prompt 0 has 0 tokens")
        ids = list(range(len(prompt)))
        return Samples.from_lists([ids] * n, [[0.0] * len(ids)] * n, [False] * n, self.version)

    async def check_health(self):
        if self.hangs:
            await asyncio.sleep(600)

    async def close(self):
        pass


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors don't import tests
    with ray_cluster.cluster(num_cpus=2):
        folder = session_folder()
        yield
    assert not folder.exists(), "a cluster that ended well leaves nothing"


def session_folder():
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def listening(process):
    return [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]


def asynchronous(test):
    @functools.wraps(test)
    def run():
        asyncio.run(test())

    return run


@asynchronous
async def test_a_cluster_of_this_machine_listens_on_loopback_alone_and_nobody_else_can_enter_its_folder():
    engine = await launch("engine 0", Engine, num_cpus=0.1)
    addresses = [ip for child in psutil.Process().children(recursive=True) for ip in listening(child)]
    addresses += listening(psutil.Process())
    await engine.close()
    assert engine.name == "engine 0 on 127.0.0.1" and len(addresses) > 5, "head, raylet, agents and actor listen"
    exposed = [ip for ip in addresses if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback]
    assert not exposed
    assert not ray._private.worker.get_dashboard_url()
    folder = session_folder()
    assert (folder / "sockets").is_dir()
    assert any(parent.stat().st_mode & 0o077 == 0 for parent in folder.parents)


@asynchronous
async def test_an_actors_engine_answers_and_its_errors_are_its_own():
    engine = await launch("engine 0", Engine, num_cpus=0.1)
    assert engine.max_model_len == 64 and engine.dtype is torch.bfloat16 and engine.pids != [os.getpid()]
    samples = await engine.generate("a", [5, 6, 7], 2, Sampling())
    assert samples.response_ids.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        await engine.generate("b", [], 1, Sampling())
    assert engine.submit("generate", "c", [5], 1, Sampling()).result(timeout=30).response_ids.tolist() == [0]
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        engine.submit("generate", "d", [], 1, Sampling()).result(timeout=30)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDeadError, match=r"engine 0 on .* was closed before check_health"):
        await engine.check_health()


@asynchronous
async def test_an_actor_whose_process_ends_is_replaced_by_the_fleet():
    fleet = Fleet(lambda number: launch(f"engine {number}", Engine, num_cpus=0.1), size=1)
    await fleet.start()
    await fleet.admit(await fleet.present())
    with pytest.raises(EngineLostError, match=r"engine 0 on .* died during generate"):
        await fleet.call(lambda e: e.generate("a", [13], 1, Sampling()))
    await fleet.new_engine()
    await fleet.admit(await fleet.present())
    samples = await fleet.call(lambda e: e.generate("a", [12], 1, Sampling()))
    assert samples.response_ids.tolist() == [0] and fleet.restarts == 1
    await fleet.close()


def refuse(why: str) -> Engine:
    raise ValueError(why)


@pytest.mark.nightly
@asynchronous
async def test_a_failed_start_gives_the_reason():
    with pytest.raises(EngineDeadError, match=r"engine 3 did not start: (.|\n)*no memory") as caught:
        await launch("engine 3", lambda: Engine(broken=True), num_cpus=0.1)
    assert type(caught.value) is EngineDeadError, "another one would say the same"
    with pytest.raises(ValueError, match="^engine 3 did not start: lower max_model_len$"):
        await launch("engine 3", lambda: refuse("lower max_model_len"), num_cpus=0.1)
    with pytest.raises(EngineStartError, match="engine 4 did not start"):
        await launch("engine 4", lambda: os._exit(1), num_cpus=0.1)
    with pytest.raises(EngineDeadError, match=r"within 2 s.* loads slowly.* no room for 64 CPUs and 0 GPUs"):
        await launch("engine 4", Engine, num_cpus=64, deadline_s=2)


@pytest.mark.nightly
@asynchronous
async def test_an_actor_that_hangs_is_named_in_time_and_counts_as_dead():
    engine = await launch("engine 5", Engine, num_cpus=0.1)
    begun = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"engine 5 on .* did not answer check_health within 2 s"):
        await engine.generate("a", [14], 1, Sampling())
    await engine.close()
    assert time.monotonic() - begun < 30
