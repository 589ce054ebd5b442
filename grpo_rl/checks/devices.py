"""Checks of the devices: the plan of who uses which, and whether trainers can sum a tensor."""

import datetime
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig

from grpo_rl.assembly.devices import plan_devices
from grpo_rl.by_name import one_line
from grpo_rl.checks.check import Case, Finding
from grpo_rl.checks.model import source_of
from grpo_rl.envs.guards.isolation import IsolatedCalls
from grpo_rl.settings.devices import Devices, allocate

COLLECTIVE_S = 30.0
"""Seconds for the ranks to meet and to sum a tensor, once they have started."""
NUMBERS = 1024


def devices(case: Case) -> Iterator[Finding]:
    """The plan against the devices that are there."""
    yield Finding("OK", "devices", str(plan_of(case)))


def plan_of(case: Case) -> Devices:
    """The device plan of the run, as far as it is known without starting anything."""
    settings, source = case.read, source_of(case)
    if settings.mode != "async":
        return plan_devices(settings, Path(source))
    from grpo_rl.assembly.site import check_parallel, check_transfer  # Ray, which sync mode does without

    check_parallel(settings)
    heads = AutoConfig.from_pretrained(source).get_text_config().num_attention_heads
    gpus, cores = case.cluster or (None, len(os.sched_getaffinity(0)))
    plan = allocate(settings, "async", gpus, heads, cores, counts_only=case.cluster is not None)
    check_transfer(settings, plan)
    return plan


def collectives(case: Case) -> Iterator[Finding]:
    """Has as many processes as will train sum a tensor, by gloo, and on GPUs by NCCL."""
    ranks = [] if case.cluster else [str(device) for device in plan_of(case).train]
    if len(ranks) < 2:
        yield Finding("SKIP", "collectives", "the nodes sum one, above" if case.cluster else "one process trains")
        return
    port = free_port()
    arguments = [("127.0.0.1", port, rank, len(ranks), device, COLLECTIVE_S) for rank, device in enumerate(ranks)]
    with IsolatedCalls(all_reduce, len(ranks), COLLECTIVE_S + 5, memory_gib=None, again=False) as calls:
        results = calls.map(arguments)
    yield summed({f"rank {rank}": result for rank, result in enumerate(results)})


def free_port() -> int:
    """A port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def all_reduce(host: str, port: int, rank: int, size: int, device: str, timeout_s: float) -> float:
    """The seconds that the ranks took to meet and to sum a tensor, on the CPU and on this rank's GPU, if it has one.

    Raises:
        RuntimeError: the others did not come within ``timeout_s``, or the sum is wrong.
    """
    timeout, began = datetime.timedelta(seconds=timeout_s), time.monotonic()
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        for where in ["cpu", device] if on_gpu else ["cpu"]:
            result = torch.full((NUMBERS,), float(rank + 1), device=where)
            dist.all_reduce(result)
            if not bool((result == size * (size + 1) / 2).all()):
                raise RuntimeError(f"rank {rank}: 1 + ... + {size} is {result[0].item()} on {where}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return time.monotonic() - began


def summed(results: Mapping[str, float | Exception]) -> Finding:
    """The finding on what :func:`all_reduce` gave, by rank or node."""
    failed = {name: result for name, result in results.items() if isinstance(result, Exception)}
    if not failed:
        slowest = max(seconds for seconds in results.values() if not isinstance(seconds, Exception))
        return Finding("OK", "collectives", f"{len(results)} processes summed a tensor in {slowest:.2g} s")
    # The error of a rank that failed by itself is more useful than those of ranks that waited for it.
    first = sorted(failed, key=lambda name: isinstance(failed[name], TimeoutError))[:3]
    text = "; ".join(f"{name}: {one_line(failed[name])[:200]}" for name in first)
    remedy = "see firewalls, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and, with NCCL_DEBUG=INFO, NCCL's output"
    text = f"{len(failed)} of {len(results)} could not sum a tensor; {text}: {remedy}"
    return Finding("FIX", "collectives", text)
