"""Checks of the devices: the plan of who uses which, whether each computes, and whether trainers can sum a tensor."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress

import torch
from transformers import AutoConfig

from grpo_rl.assembly.devices import check_devices
from grpo_rl.by_name import one_line
from grpo_rl.checks.all_reduce import all_reduce
from grpo_rl.checks.check import Case
from grpo_rl.checks.finding import Finding
from grpo_rl.checks.model_of_run import source_of
from grpo_rl.envs.guards.guard import in_thread
from grpo_rl.envs.guards.isolation import IsolatedCalls
from grpo_rl.settings.devices import Devices, allocate

COLLECTIVE_S = 45.0
"""Seconds for the ranks to meet and to sum a tensor, once they have started."""
SHOWN_RANKS = 3
"""Failed ranks that are shown."""


def devices(case: Case) -> Iterator[Finding]:
    """The plan against the devices that are there, each of which computes a sum."""
    plan = plan_of(case)
    text = str(plan)
    if case.cluster is None:
        for device in dict.fromkeys((*plan.train, *plan.ref, *plan.inference)):
            if device.type == "cuda":
                total = torch.ones(1024, device=device).sum().item()
                if total != 1024:
                    yield Finding("FIX", "devices", f"{device} sums 1,024 ones to {total}; take it out")
                    return
    yield Finding("OK", "devices", text)


def plan_of(case: Case) -> Devices:
    """The device plan of the run, as far as it is known without starting anything.

    Raises:
        ValueError: it does not fit the devices that are there, or no script runs it.
    """
    settings, heads = case.read, None
    with suppress(Exception):  # a model that is not in order is the matter of its own check
        heads = AutoConfig.from_pretrained(source_of(case)).get_text_config().num_attention_heads
    if settings.mode != "async":
        plan = allocate(settings, num_attention_heads=heads)
        check_devices(settings, plan)
        return plan
    from grpo_rl.assembly.site import check_parallel, check_transfer  # Ray, which sync mode does without

    check_parallel(settings)
    if case.cluster:
        gpus, cores = case.cluster
        plan = allocate(settings, "async", gpus, heads, cores, counts_only=True)
    else:
        plan = allocate(settings, "async", num_attention_heads=heads, cores=len(os.sched_getaffinity(0)))
    check_transfer(settings, plan)
    return plan


def collectives(case: Case) -> Iterator[Finding]:
    """Has as many processes as will train sum a tensor, by gloo, and on GPUs by NCCL."""
    if case.cluster:
        yield Finding("SKIP", "collectives", "the nodes' own line tells")
        return
    plan = plan_of(case)
    if len(plan.train) < 2:
        yield Finding("SKIP", "collectives", "one process trains")
        return
    ranks = [str(device) for device in plan.train]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [("127.0.0.1", port, rank, len(ranks), device, COLLECTIVE_S) for rank, device in enumerate(ranks)]
    failed: dict[int, Exception] = {}
    calls = IsolatedCalls(all_reduce, len(ranks), COLLECTIVE_S, memory_gib=None, again=False)

    def on_result(rank: int, result: float | Exception) -> None:
        if isinstance(result, Exception) and not calls.closed:
            failed[rank] = result
            if not isinstance(result, TimeoutError):  # the others would wait for it
                in_thread(calls.close, True)

    results: list[float] = []
    with calls:
        try:
            results = calls.map(arguments, on_result=on_result)
        except (RuntimeError, CancelledError):
            if not failed:
                raise
    backend = "nccl and gloo" if plan.train[0].type == "cuda" else "gloo"
    size = len(ranks)
    if not failed:
        yield Finding("OK", "collectives", f"{size} processes summed a tensor by {backend} in {max(results):.2g} s")
        return
    # The first decides: where rank 0 runs out of time, its store goes with it, and the others lose their connection.
    if isinstance(next(iter(failed.values())), TimeoutError):
        text = (
            f"no sum within {COLLECTIVE_S:g} s, though all {size} ranks are up: they can't reach each other; see "
            "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and, with NCCL_DEBUG=INFO, what NCCL says"
        )
    else:
        # The lowest rank that failed may only say that another one is gone.
        shown = sorted(failed)[:SHOWN_RANKS]
        text = "; ".join(f"rank {rank} of {size}: {one_line(failed[rank])[:200]}" for rank in shown)
    yield Finding("FIX", "collectives", f"{backend}: {text}")
