"""One rank that sums a small tensor with the others."""

from __future__ import annotations

import datetime
import time

import torch
import torch.distributed as dist

NUMBERS = 1024


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
            summed = torch.full((NUMBERS,), float(rank + 1), device=where)
            dist.all_reduce(summed)
            if not bool((summed == size * (size + 1) / 2).all()):
                raise RuntimeError(f"rank {rank}: 1 + ... + {size} is {summed[0].item()} on {where}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return time.monotonic() - began
