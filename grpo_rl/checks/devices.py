"""Checks of the devices: the plan of who uses which, whether each computes, and whether trainers can sum a tensor."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import IO

import torch
from transformers import AutoConfig

from grpo_rl.assembly.devices import check_devices
from grpo_rl.checks.all_reduce import HERE, SECONDS
from grpo_rl.checks.finding import Finding
from grpo_rl.checks.in_turn import Case
from grpo_rl.checks.model_of_run import source_of
from grpo_rl.settings.devices import Devices, allocate

COLLECTIVE_S = 60.0
"""Seconds for the ranks to start, to meet and to sum a tensor."""
POLL_S = 0.1
SHOWN_RANKS = 3
"""Failed ranks that are told; more are counted."""


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
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in ranks]
        started = [start(rank, len(ranks), port, device, logs[rank]) for rank, device in enumerate(ranks)]
        began = time.monotonic()
        try:
            while time.monotonic() < began + COLLECTIVE_S and any(process.poll() is None for process in started):
                if any(process.poll() for process in started):
                    break  # the others would wait for it
                time.sleep(POLL_S)
            codes = [process.poll() for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        backend = "nccl and gloo" if plan.train[0].type == "cuda" else "gloo"
        if not any(codes) and None not in codes:
            # A rank may have printed a warning after it.
            words = [line.split() for log in logs for line in _said(log)]
            seconds = max(float(line[1]) for line in words if line[:1] == [SECONDS])
            text = f"{len(ranks)} processes summed a tensor by {backend} in {seconds:.2g} s"
            yield Finding("OK", "collectives", text)
            return
        yield Finding("FIX", "collectives", f"{backend}: {_cause(codes, [_said(log) for log in logs])}")


def _said(log: IO[str]) -> list[str]:
    log.seek(0)
    return [line.strip() for line in log if line.strip()] or [""]


def _cause(codes: list[int | None], said: list[list[str]]) -> str:
    """The rank that failed, or those that never came; where all came, the network between them is silent."""
    if failed := [rank for rank, code in enumerate(codes) if code]:
        # The lowest rank that failed may only say that another one is gone.
        told = [
            f"rank {rank} of {len(codes)} ended with exit code {codes[rank]}: {said[rank][-1][:200]}" for rank in failed
        ]
        more = f"; and {len(told) - SHOWN_RANKS} more" if len(told) > SHOWN_RANKS else ""
        return "; ".join(told[:SHOWN_RANKS]) + more
    waiting = f"no sum within {COLLECTIVE_S:g} s"
    if absent := [str(rank) for rank, lines in enumerate(said) if HERE not in lines]:
        return f"{waiting}: of {len(codes)} ranks, {', '.join(absent)} did not come"
    return (
        f"{waiting}, though all {len(codes)} ranks are up: they can't reach each other; see GLOO_SOCKET_IFNAME, "
        "NCCL_SOCKET_IFNAME and, with NCCL_DEBUG=INFO, what NCCL says"
    )


def start(rank: int, size: int, port: int, device: str, log: IO[str]) -> subprocess.Popen[str]:
    """Starts a rank that sums; it prints into the log when it is up, and the seconds when it is done."""
    words = ["127.0.0.1", str(port), str(rank), str(size), device, str(COLLECTIVE_S)]
    command = [sys.executable, "-m", "grpo_rl.checks.all_reduce", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
