"""The check of the run's folder: whether it can be written and locked, and who still holds it."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_rl.checks.check import Case, Finding
from grpo_rl.run import claim
from grpo_rl.run.lock import FolderLock, in_use
from grpo_rl.storage.whole_file import write_whole
from grpo_rl.training.checkpoint import checkpoints

PROBE_BYTES = 1 << 20


def place_of(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def folder_of(case: Case) -> Path:
    """The folder that the run will write to: its own, or the one that it resumes in."""
    resume = case.settings and case.settings.resume
    folder = case.folder if resume in (None, "auto") else claim.folder_of(case.folder, resume)
    return folder.absolute()


def run_folder(case: Case) -> Iterator[Finding]:
    """Checks that the run can start there; writes, locks and syncs next to its files, and leaves nothing."""
    folder, resume = folder_of(case), case.settings and case.settings.resume
    if folder.is_dir() and (error := in_use(folder)):
        raise error
    if case.settings and resume != "auto":
        _check_start(folder, Path(resume).absolute() if resume else None)
    place = place_of(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor_", dir=place) as probe:
            lock = FolderLock(Path(probe))
            began = time.monotonic()
            write_whole(Path(probe) / "probe", bytes(PROBE_BYTES))
            seconds = time.monotonic() - began
            lock.close()
    except OSError as error:
        raise ValueError(f"{place} can't be written ({error.strerror}); set hydra.run.dir") from error
    if lock.warning:
        text = f"{folder}: its file system has no locks; make sure that no other process writes there"
        yield Finding("note", "run folder", text)
    else:
        text = f"{folder}: written, locked, {PROBE_BYTES >> 20} MiB safe on the disk in {seconds:.2g} s"
        yield Finding("OK", "run folder", text)


def _check_start(folder: Path, resume: Path | None) -> None:
    """Refuses a folder with another run, and a ``resume`` that names nothing, by ``ValueError``."""
    if resume and resume.is_relative_to(folder) and folder.exists():
        return  # the folder's own run goes on
    if resume and not resume.is_file() and not checkpoints(resume):
        raise ValueError(f"resume={resume}: no checkpoint there; give a checkpoint_*.pt, a run's folder, or auto")
    claim.refuse_other_run(folder, resume)
