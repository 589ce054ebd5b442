"""Checks of the run's folder: whether it can be written and locked, who still holds it, whether its disk is large."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from grpo_rl.checks.finding import Finding
from grpo_rl.checks.in_turn import Case
from grpo_rl.report.files import began_from
from grpo_rl.run.lock import LOCK, FolderLock, in_use
from grpo_rl.storage.whole_file import write_whole

PROBE_BYTES = 1 << 20
SLOW_S = 1.0
"""Seconds that a file of :data:`PROBE_BYTES` may take until it is safe: checkpoints and logs are written so."""
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
PROBE = ".doctor_"


def place_of(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def folder_of(case: Case) -> Path:
    """The folder that the run will write to: its own, or the one that it resumes in.

    Raises:
        ValueError: ``resume`` names nothing that a run can go on from.
    """
    resume = case.settings and case.settings.resume
    if resume in (None, "auto"):
        return case.folder
    place = Path(resume).absolute()
    holder = place.parent if place.is_file() else place
    if any((place / name).exists() for name in (CHECKPOINTS, METRICS, LOCK)):
        return place
    if not place.is_file() and not list(place.glob("checkpoint_*.pt")):
        what = "no run and no checkpoint is there" if place.exists() else "nothing is there"
        raise ValueError(f"resume={resume}: {what}; give a checkpoint_*.pt, a run's folder, or auto")
    return holder.parent if holder.name == CHECKPOINTS else case.folder


def _folder_or_own(case: Case) -> Path:
    """The folder that the run will write to; its own where :func:`run_folder` tells that it can't resume."""
    try:
        return folder_of(case)
    except ValueError:
        return case.folder


def run_folder(case: Case) -> Iterator[Finding]:
    """Writes, locks and syncs beside the files that the run will write, and leaves nothing."""
    about = "run folder"
    try:
        folder = folder_of(case)
    except ValueError as error:
        yield Finding("FIX", about, str(error))
        return
    place = place_of(folder)
    if case.settings and folder == case.folder and _trained(folder) and not _goes_on(folder, case.settings.resume):
        text = f"{folder} already holds a run; go on with it (resume={folder}) or set another hydra.run.dir"
        yield Finding("FIX", about, text)
        return
    try:
        probe = Path(tempfile.mkdtemp(prefix=PROBE, dir=place))
    except OSError as error:
        yield Finding("FIX", about, f"{place} can't be written ({error.strerror}); set hydra.run.dir")
        return
    try:
        lock = FolderLock(probe)
        held = in_use(probe)
        began = time.monotonic()
        write_whole(probe / "probe", bytes(PROBE_BYTES))
        seconds = time.monotonic() - began
        lock.close()
    except OSError as error:
        yield Finding("FIX", about, f"{place}: {error.strerror} ({error.filename or 'lock'}); set hydra.run.dir")
        return
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    text = f"{folder}: written, locked, {PROBE_BYTES >> 20} MiB safe on the disk in {seconds:.2g} s"
    if lock.warning or held is None:
        text = f"{folder}: its file system has no locks; see to it that no other process writes there"
    elif seconds > SLOW_S:
        text += ": slow, and every step waits for its log; a local disk is faster"
    good = held is not None and not lock.warning and seconds <= SLOW_S
    yield Finding("OK" if good else "note", about, text)


def _goes_on(folder: Path, resume: str | None) -> bool:
    """Tells whether ``resume`` is the folder's own run, or the checkpoint of elsewhere that this began from."""
    if resume in (None, "auto"):
        return resume == "auto"
    place, began = Path(resume).absolute(), began_from(folder)
    return place == folder.absolute() or (began is not None and place in (began[0], began[0].parent))


def _trained(folder: Path) -> bool:
    """Tells whether steps are logged in the folder; one whose run failed at its start may be used again."""
    try:
        *lines, _ = (folder / METRICS).read_text().split("\n")  # a run that was killed leaves a torn last line
    except OSError:
        return False
    return bool(lines) and (int(json.loads(lines[-1]).get("step", 0)) > 0 or (folder / "summary.json").exists())


def leftovers(case: Case) -> Iterator[Finding]:
    """Processes of an earlier run that hold the folder, by its lock or by open files."""
    about = "leftovers"
    folder = _folder_or_own(case).absolute()
    if not folder.is_dir():
        busy = []
        with suppress(OSError):  # a folder that can't be read, or is gone by now
            busy = [run for path in folder.parent.parent.glob("*/*/.lock") if in_use(run := path.parent)]
        if busy and not case.named:
            text = f"{len(busy)} other runs are going on in {folder.parent.parent}, {busy[0].name} first"
            yield Finding("note", about, f"{text}: they take memory and time of this one")
        else:
            yield Finding("OK", about, "none: the folder is new")
        return
    if error := in_use(folder):
        yield Finding("FIX", about, str(error))
    elif holders := list(_holders(folder.resolve())):
        text = f"processes of an earlier run write to files of {folder}: {'; '.join(holders[:5])}; end them"
        yield Finding("FIX", about, text)
    else:
        yield Finding("OK", about, f"no process holds {folder}")


def _holders(folder: Path) -> Iterator[str]:
    """Processes of this user that write to files in the folder, without those of this one's own job."""
    own = set(_with_ancestors(os.getpid()))
    job = os.environ.get("SLURM_JOB_ID")
    mark = f"SLURM_JOB_ID={job}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in own:
            continue
        with suppress(OSError):  # it has ended, or is another user's
            # Ray's processes have no ancestor in the job that started them, but its environment.
            if job and mark in (process / "environ").read_bytes().split(b"\0"):
                continue
            for file in (process / "fd").iterdir():
                if _belongs(Path(os.readlink(file)), folder) and _writes(process / "fdinfo" / file.name):
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    yield f"pid {process.name} ({command[:60]})"
                    break


def _belongs(file: Path, folder: Path) -> bool:
    """Tells whether a file is of the run in the folder: not of another run inside it, nor of a doctor at work there."""
    if not file.is_relative_to(folder):
        return False
    inside = file.relative_to(folder).parts[:-1]
    runs = (folder.joinpath(*inside[: i + 1], LOCK) for i in range(len(inside)))
    return not any(part.startswith(PROBE) for part in inside) and not any(lock.exists() for lock in runs)


def _writes(info: Path) -> bool:
    """Tells whether an open file can be written, by its flags in /proc; `tail -f` and TensorBoard only read."""
    flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _with_ancestors(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            return


def disk(case: Case) -> Iterator[Finding]:
    """The free space against what the run will write."""
    # Here, not above: this imports torch, which the other checks do without.
    from grpo_rl.assembly.run import needed_room
    from grpo_rl.checks.model_of_run import source_of
    from grpo_rl.policies.hub import weight_files
    from grpo_rl.policies.loading import skeleton
    from grpo_rl.settings.derived import total_steps

    settings, source = case.read, Path(source_of(case))
    files = weight_files(source) if source.is_dir() else []
    size = sum(path.stat().st_size for path in files) or 2 * sum(p.numel() for p in skeleton(str(source)).parameters())
    room = needed_room(settings, size)
    if not settings.train.keep_checkpoints and settings.train.checkpoint_frequency:  # all of them are kept
        room = replace(room, checkpoints=1 + total_steps(settings) // settings.train.checkpoint_frequency)
    folder = _folder_or_own(case)
    place = place_of(folder)
    free, lacking = shutil.disk_usage(place).free, room.lacking(folder)
    text = f"{free / 2**30:,.1f} GiB are free at {place}, and {room.described(lacking)}"
    if free >= lacking:
        yield Finding("OK", "disk", text)
    else:
        remedy = "free some space, set hydra.run.dir, or keep fewer (train.keep_checkpoints)"
        yield Finding("FIX", "disk", f"{text}; {remedy}")
