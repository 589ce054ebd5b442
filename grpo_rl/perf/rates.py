"""Rates of this machine at its best, in matrix products and memory, measured once and remembered."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch

from grpo_rl.storage.cache import cache_folder
from grpo_rl.storage.whole_file import replacing

PROBE_BYTES = 2**29
"""Size of the memory that is read: more than the caches of all but the largest servers hold."""


@dataclass(frozen=True)
class Rates:
    """The rates of a machine at its best.

    Args:
        gemm_flops_per_s: floating-point operations a second in a large matrix product.
    """

    gemm_flops_per_s: float
    bytes_per_s: float

    def best(self, other: Rates) -> Rates:
        """The higher of each: what slows a measurement down is never the machine's doing."""
        return Rates(*map(max, astuple(self), astuple(other)))


def machine_rates(dtype: torch.dtype, device: torch.device | str = "cpu", again: bool = False) -> Rates:
    """The rates of this machine, measured the first time and kept in the cache folder.

    Args:
        again: measure even so, and keep the higher of both.
    """
    path, name = cache_folder() / "rates.json", _machine(dtype, torch.device(device))
    known = _read(path).get(name)
    if known and not again:
        return known
    rates = measure_rates(dtype, device)
    rates = rates.best(known) if known else rates
    kept = {name: asdict(r) for name, r in (_read(path) | {name: rates}).items()}
    with contextlib.suppress(OSError):  # a cache that can't be written costs a second at each start, and no run
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, path.with_suffix(f".{os.getpid()}.partial")) as partial:
            partial.write_text(json.dumps(kept, indent=2) + "\n")
    return rates


def measure_rates(dtype: torch.dtype, device: torch.device | str = "cpu", seconds: float = 1.0) -> Rates:
    """The rates of this machine: the best of all calls within about so many seconds; other load only slows them."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    sizes = (4096, 8192) if device.type == "cuda" else (512, 1024, 2048)
    part_s = seconds / (2 + len(sizes))  # the rest goes into buffers and warming up
    flops_per_s = []
    for size in sizes:  # where the best lies depends on caches and cores
        # Random numbers: a GPU draws less power, and is faster, on constants.
        factor = torch.empty(size, size, dtype=dtype, device=device).uniform_(-1, 1, generator=generator)
        took_s = _best_s(functools.partial(torch.mm, factor, factor), device, part_s)
        flops_per_s.append(2 * size**3 / took_s)
        if 8 * took_s > seconds:  # the next product; of bfloat16 in plain loops it would take a minute
            break
    memory = torch.ones(PROBE_BYTES // 4, device=device)
    bytes_per_s = memory.nbytes / _best_s(memory.sum, device, part_s)
    del factor, memory
    if device.type == "cuda":
        torch.cuda.empty_cache()  # an engine that is built next counts what is free
    return Rates(max(flops_per_s), bytes_per_s)


def _best_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    # On a GPU calls are queued: several in a row hide what starting and awaiting one costs.
    calls = 10 if device.type == "cuda" else 1

    def took_s() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    took_s()  # warm-up: kernels are chosen, memory is touched
    end = time.perf_counter() + seconds
    best = took_s()
    while time.perf_counter() < end:
        best = min(best, took_s())
    return best


def _machine(dtype: torch.dtype, device: torch.device) -> str:
    unit = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return f"{unit}, {torch.get_num_threads()} threads, {dtype}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _read(path: Path) -> dict[str, Rates]:
    try:
        return {name: Rates(**rates) for name, rates in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # none yet, or none that can be used: they are measured again
