"""Claims a run's folder, locked against other processes, and finds the checkpoint that the run resumes from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_rl.distributed.sharded_checkpoint import ABANDONED
from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.monitor.step_parts import STEP_FOLDERS
from grpo_rl.report.files import CONFIG, SUMMARY, began_from
from grpo_rl.run.model_files import is_finished
from grpo_rl.storage import checkpoint_file
from grpo_rl.storage.lock import LOCK, FolderInUseError, FolderLock, in_use
from grpo_rl.storage.yaml_text import read_yaml
from grpo_rl.training import checkpoint
from grpo_rl.training.checkpoint import CHECKPOINTS
from grpo_rl.training.logged import last_logged


@dataclass
class Claim:
    """A run's folder, locked, and how the run starts there.

    Args:
        resume: the checkpoint to resume from, or the folder that has one; None: from the beginning.
        inside: the checkpoint belongs to the run that wrote to this folder.
        again: the folder's run was cut off before its first checkpoint, or trained nothing: it starts over, and its
            logs are set aside.
        over: the run in the folder is finished, and no checkpoint is left to resume from.
        notes: messages for the user.
    """

    folder: Path
    lock: FolderLock
    resume: Path | None = None
    inside: bool = False
    again: bool = False
    over: bool = False
    notes: list[str] = field(default_factory=list)


def claim(
    own: Path, resume: str | None, outputs: Path, config: Mapping[str, Any], frequency: int, stack: ExitStack
) -> Claim:
    """Locks the folder that a run writes to, and returns how the run starts there.

    ``auto`` is the newest run of this config under ``outputs`` that has a checkpoint, or is finished and keeps none;
    without one, a new run. A run in use by another process is passed over for the newest interrupted one, but never for
    a new or a finished one.

    Args:
        own: the folder for a new run.
        resume: a checkpoint, the folder of a run, ``auto``, or None for a new run.
        config: the config of the run that starts.
        frequency: steps between its checkpoints; 0: none before the end.
        stack: releases the lock when it is closed.

    Raises:
        ValueError: the folder is in use by another process, can't be written, or lost its checkpoints; with the remedy.
    """
    notes: list[str] = []
    if resume == "auto":
        resume, notes = _newest(outputs, config)
    place, folder = (Path(resume).absolute(), folder_of(own, resume)) if resume else (None, own)
    try:
        lock = FolderLock(folder)
    except OSError as error:
        raise ValueError(f"the run can't write to {folder} ({error.strerror}); set hydra.run.dir") from error
    stack.callback(lock.close)
    claimed = Claim(folder, lock, place, notes=notes)
    if place and _is_checkpoint(place):
        if place.is_relative_to(folder.absolute() / CHECKPOINTS):
            claimed.inside = True
            return claimed
        refuse_other_run(own, place)
        if _began_at(own, place):  # the same command again goes on with it
            return _in_folder(claimed, True, frequency)
    elif place:
        is_run = _is_run(place)
        # Where neither holds, `checkpoint.restore` refuses the place.
        return _in_folder(claimed, is_run, frequency) if is_run or place.resolve() == own.resolve() else claimed
    if (own / METRICS_FILE).exists() and not trained(own):  # any other run is refused by `grpo_rl.run.folder`
        claimed.again = True
        notes.append(f"The run in {own} had trained nothing, and begins again")
    return claimed


def folder_of(own: Path, resume: str) -> Path:
    """The folder that a run writes to, its own or the one that it resumes in; see :func:`claim`."""
    place = Path(resume).absolute()  # not resolved: a link belongs to the folder that it lies in
    if _is_checkpoint(place):
        holder = place.parent if place.is_file() else place
        return holder.parent if holder.name == CHECKPOINTS else own
    return Path(resume) if _is_run(place) or place.resolve() == own.resolve() else own


def _is_checkpoint(place: Path) -> bool:
    """True of a file, and of a folder of checkpoints that is no run's."""
    return place.is_file() or bool(checkpoint.checkpoints(place) and not checkpoint.checkpoints(place / CHECKPOINTS))


def _is_run(place: Path) -> bool:
    return any((place / name).exists() for name in (CHECKPOINTS, METRICS_FILE, LOCK))


def refuse_other_run(own: Path, place: Path | None = None) -> None:
    """Refuses a new run's folder that holds a run already.

    Args:
        place: the checkpoint of elsewhere that the new run begins from; a run that began from it goes on.

    Raises:
        ValueError: the folder holds another run.
    """
    if trained(own) and not _began_at(own, place):
        raise ValueError(f"{own} already holds a run; go on with it (resume={own}) or set another hydra.run.dir")


def _began_at(own: Path, place: Path | None) -> bool:
    began = began_from(own)
    return began is not None and place in (began[0], began[0].parent)


def trained(folder: Path) -> bool:
    """True if a run took a step there, or ended."""
    return bool(checkpoint.checkpoints(folder / CHECKPOINTS) or (folder / SUMMARY).exists() or last_logged(folder))


def _in_folder(claimed: Claim, is_run: bool, frequency: int) -> Claim:
    """Decides how a run starts in a folder of its own: from a checkpoint, from the beginning, or not at all."""
    place = claimed.folder
    if checkpoint.checkpoints(place / CHECKPOINTS):
        claimed.resume, claimed.inside = place, True
        return claimed
    if is_finished(place):
        claimed.over = True
        note = f"The run in {place} is finished, and nothing is left to do; without a checkpoint it can't be prolonged"
        claimed.notes.append(note)
        return claimed
    (start, step), last = began_from(place) or (None, 0), last_logged(place)
    # A step is logged before its checkpoint is written.
    if (frequency and last > (step // frequency + 1) * frequency) or (place / SUMMARY).exists():
        raise ValueError(
            f"the run in {place} got to step {last}, and its checkpoints are gone, so it can't go on; put them back "
            f"into {place / CHECKPOINTS}, or set another hydra.run.dir"
        )
    claimed.resume, claimed.again = start, True
    if is_run:
        source = f" from {start}" if start else ""
        claimed.notes.append(f"The run in {place} was cut off before its first checkpoint, and begins again{source}")
    return claimed


def set_logs_aside(folder: Path) -> None:
    """Renames what a run logged before its first checkpoint to ``.abandoned``, replacing earlier such files."""
    for name in (*STEP_FOLDERS, METRICS_FILE):
        path = folder / name
        aside = path.with_name(f"{name}{ABANDONED}")
        if path.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        if path.exists():
            path.rename(aside)


def _newest(outputs: Path, config: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The newest run of this config under ``outputs`` that is not in use and can go on or is over, if any; and notes.

    Raises:
        ValueError: every run of this config is in use by another process.
    """
    other, live = [], list[FolderInUseError]()
    for run in _runs(outputs):
        with suppress(OSError):  # another user's, or deleted meanwhile
            if differs := _differs(run, config):
                other.append(f"Passed over by resume=auto: {run} is of another config. {differs}")
            elif busy := in_use(run):
                live.append(busy)
            elif (not live) if is_finished(run) else checkpoint.checkpoints(run / CHECKPOINTS):
                return str(run), [f"Passed over by resume=auto: {error}" for error in live]
    if live:
        raise ValueError(f"resume=auto finds no other run of this config that was cut off, and {live[0]}")
    return None, other[:1]


def _runs(outputs: Path) -> list[Path]:
    """Folders that hold checkpoints or a lock, newest first."""
    newest: dict[Path, float] = {}
    for path in outputs.glob(f"**/{CHECKPOINTS}/checkpoint_*.pt"):
        with suppress(OSError):  # deleted meanwhile
            run = path.parent.parent
            newest[run] = max(newest.get(run, 0.0), path.stat().st_mtime)
    for path in outputs.glob(f"**/{LOCK}"):  # runs without a checkpoint may be in use by another process
        with suppress(OSError):
            newest.setdefault(path.parent, path.stat().st_mtime)
    return sorted(newest, key=lambda run: newest[run], reverse=True)


def _differs(run: Path, config: Mapping[str, Any]) -> str | None:
    """The difference of a stored run's config, in words; None if none matters, or it was not stored."""
    saved = None
    for path in reversed(checkpoint.checkpoints(run / CHECKPOINTS)):
        with suppress(ValueError, KeyError, TypeError):
            saved = json.loads(checkpoint_file.read(path)["config"])
            break
    try:
        if saved is None and (run / CONFIG).exists():
            saved = read_yaml((run / CONFIG).read_text())
        if saved is not None:
            checkpoint.check_config(saved, config)
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    return None
