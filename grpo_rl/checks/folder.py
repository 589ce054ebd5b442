"""Checks of the run's folder: whether it can be written and locked, and who still holds it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from grpo_rl.checks.check import Case, Finding
from grpo_rl.run import claim
from grpo_rl.storage.lock import FolderLock, in_use
from grpo_rl.storage.whole_file import write_whole
from grpo_rl.training.checkpoint import checkpoints

PROBE, PROBE_BYTES = ".doctor_", 1 << 20


def place_of(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def folder_of(case: Case) -> Path:
    """The folder that the run will write to: its own, or the one that it resumes in."""
    resume = case.settings and case.settings.resume
    folder = case.folder if resume in (None, "auto") else claim.folder_of(case.folder, resume)
    return folder.absolute()


def run_folder(case: Case) -> Iterator[Finding]:
    """Whether the run can start there; writes, locks and syncs next to its files, and leaves nothing."""
    folder = folder_of(case)
    if case.settings and case.settings.resume != "auto":
        _check_start(folder, case.settings.resume)
    place = place_of(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=PROBE, dir=place) as probe:
            lock = FolderLock(Path(probe))
            began = time.monotonic()
            write_whole(Path(probe) / "probe", bytes(PROBE_BYTES))
            seconds = time.monotonic() - began
            lock.close()
    except OSError as error:
        raise ValueError(f"{place} can't be written ({error.strerror}); set hydra.run.dir") from error
    text = f"{folder}: written, locked, {PROBE_BYTES >> 20} MiB safe on the disk in {seconds:.2g} s"
    if lock.warning:
        text = f"{folder}: its file system has no locks; make sure that no other process writes there"
    yield Finding("note" if lock.warning else "OK", "run folder", text)


def _check_start(folder: Path, resume: str | None) -> None:
    """Refuses a folder with another run, and a ``resume`` that names nothing, by ``ValueError``."""
    place = Path(resume).absolute() if resume else None
    if place and place.is_relative_to(folder) and folder.exists():
        return  # the folder's own run goes on
    if place and not place.is_file() and not checkpoints(place):
        raise ValueError(f"resume={resume}: no checkpoint there; give a checkpoint_*.pt, a run's folder, or auto")
    claim.refuse_other_run(folder, place)


def leftovers(case: Case) -> Iterator[Finding]:
    """Processes of an earlier run that hold the folder, by its lock or by open files."""
    folder = folder_of(case)
    if folder.is_dir() and (error := in_use(folder)):
        raise error
    if holders := list(_holders(folder.resolve())):
        text = f"processes of an earlier run write to files of {folder}: {'; '.join(holders[:5])}; end them"
        yield Finding("FIX", "leftovers", text)
    else:
        yield Finding("OK", "leftovers", f"no process holds {folder}")


def _holders(folder: Path) -> Iterator[str]:
    """Processes of this user that write to files in the folder, without those of this one's own job."""
    this, job = psutil.Process(), os.environ.get("SLURM_JOB_ID")
    own = {this.pid, *(parent.pid for parent in this.parents())}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            # Ray's processes have no ancestor in the job that started them, but its environment.
            if process.pid in own or (job and process.environ().get("SLURM_JOB_ID") == job):
                continue
            # `tail -f` and TensorBoard only read.
            written = [Path(file.path) for file in process.open_files() if file.mode != "r" and PROBE not in file.path]
            if any(path.is_relative_to(folder) for path in written):
                yield f"pid {process.pid} ({' '.join(process.cmdline())[:60]})"
