"""Claims a run's folder, locked against other processes, and finds the checkpoint that the run resumes from."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_rl.distributed.sharded_checkpoint import ABANDONED
from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.monitor.step_parts import STEP_FOLDERS
from grpo_rl.report.files import CONFIG, SUMMARY, began_from, read_summary
from grpo_rl.run.lock import LOCK, FolderInUseError, FolderLock, in_use
from grpo_rl.run.push import MODEL
from grpo_rl.run.resumed import check_config
from grpo_rl.storage import checkpoint_file
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
    """

    folder: Path
    lock: FolderLock
    resume: Path | None = None
    inside: bool = False
    again: bool = False
    over: bool = False
    notes: list[str] = field(default_factory=list)


def claim(own: Path, resume: str | None, outputs: Path, config: Mapping[str, Any], frequency: int) -> Claim:
    """Locks the folder that a run writes to, and returns how the run starts there.

    ``auto`` is the newest run of this config under ``outputs`` that has a checkpoint, or is finished and keeps none;
    without one, a new run. A run in use by another process is passed over for the newest interrupted one, but never for
    a new or a finished one.

    Args:
        own: the folder for a new run.
        resume: a checkpoint, the folder of a run, ``auto``, or None for a new run.
        frequency: steps between its checkpoints; 0: none before the end.

    Raises:
        ValueError: the folder is in use by another process, can't be written, or lost its checkpoints; with the remedy.
    """
    if resume == "auto":
        return _newest(own, outputs, config)
    if resume is None:
        return _new(own)
    place, folder = Path(resume).absolute(), folder_of(own, resume)
    if _is_checkpoint(place):
        if place.is_relative_to(folder.absolute() / CHECKPOINTS):
            return Claim(folder, _locked(folder), place, inside=True)
        return _from_elsewhere(own, place, frequency)
    is_run = _is_run(place)
    if not is_run and place.resolve() != own.resolve():
        return Claim(own, _locked(own), place)  # refused by `checkpoint.restore`
    with _released_on_error(_locked(folder)) as lock:
        return _in_folder(folder, lock, is_run, frequency)


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
    """
    if trained(own) and not _began_at(own, place):
        raise ValueError(f"{own} already holds a run; go on with it (resume={own}) or set another hydra.run.dir")


def _began_at(own: Path, place: Path | None) -> bool:
    began = began_from(own)
    return began is not None and place in (began[0], began[0].parent)


def trained(folder: Path) -> bool:
    """True if a run took a step there, or ended."""
    return bool(checkpoint.checkpoints(folder / CHECKPOINTS) or (folder / SUMMARY).exists() or last_logged(folder))


def _new(own: Path, place: Path | None = None) -> Claim:
    """Claims a folder for a new run; a run there that trained nothing, as its start failed, begins again.

    Any other run that is there is refused later (`grpo_rl.run.folder`).

    Args:
        place: the checkpoint of elsewhere that it begins from.
    """
    with _released_on_error(_locked(own)) as lock:
        again = (own / METRICS_FILE).exists() and not trained(own)
    notes = [f"The run in {own} had trained nothing, and begins again"] * again
    return Claim(own, lock, place, again=again, notes=notes)


def _from_elsewhere(own: Path, place: Path, frequency: int) -> Claim:
    """Claims a folder for a run that begins from a checkpoint of elsewhere; the same command again goes on with it."""
    claimed = _new(own, place)
    with _released_on_error(claimed.lock):
        refuse_other_run(own, place)
        return _in_folder(own, claimed.lock, True, frequency) if _began_at(own, place) else claimed


def _in_folder(place: Path, lock: FolderLock, is_run: bool, frequency: int) -> Claim:
    """Decides how a run starts in a folder of its own: from a checkpoint, from the beginning, or not at all."""
    if checkpoint.checkpoints(place / CHECKPOINTS):
        return Claim(place, lock, place, inside=True)
    if is_finished(place):
        return _over(place, lock)
    start, step = began_from(place) or (None, 0)
    last, frequency = last_logged(place), _own_frequency(place, frequency)
    # A step is logged before its checkpoint is written.
    if (frequency and last > (step // frequency + 1) * frequency) or (place / SUMMARY).exists():
        gone = f"the run in {place} got to step {last}, and its checkpoints are gone"
        raise ValueError(f"{gone}; put them back, or set another hydra.run.dir")
    cut = f"run in {place} was cut off before its first checkpoint, and"
    if start and not start.is_file():
        raise ValueError(f"the {cut} {start}, which it began from, is gone; put it back, or set another hydra.run.dir")
    source = f" from {start}" if start else ""
    notes = [f"The {cut} begins again{source}"] * is_run
    return Claim(place, lock, start, again=True, notes=notes)


def _own_frequency(place: Path, frequency: int) -> int:
    """The steps between checkpoints of the folder's run, which this start may change; as given if unknown."""
    try:
        return int(read_yaml((place / CONFIG).read_text(encoding="utf-8"))["train"]["checkpoint_frequency"])
    except (OSError, ValueError, TypeError, KeyError):
        return frequency


def _over(place: Path, lock: FolderLock) -> Claim:
    note = f"The run in {place} is finished, and nothing is left to do; without a checkpoint it can't be prolonged"
    return Claim(place, lock, over=True, notes=[note])


def set_logs_aside(folder: Path) -> None:
    """Renames what a run logged before its first checkpoint to ``.abandoned``, replacing earlier such files."""
    for name in (*STEP_FOLDERS, METRICS_FILE):
        path = folder / name
        aside = path.with_name(f"{name}{ABANDONED}")
        if path.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        if path.exists():
            path.rename(aside)


def _newest(own: Path, outputs: Path, config: Mapping[str, Any]) -> Claim:
    """The newest run of this config under ``outputs`` that has a checkpoint and is not in use; else a new one."""
    notes: list[str] = []
    live: list[FolderInUseError] = []
    for run in _runs(outputs):
        try:
            busy, other = in_use(run), _differs(run, config)
            if other:
                notes += [f"Passed over by resume=auto: {run} is of another config. {other}"] * (not notes)
            elif busy:
                live.append(busy)
            elif checkpoint.checkpoints(run / CHECKPOINTS):
                if not (live and is_finished(run)):
                    passed = [f"Passed over by resume=auto: {error}" for error in live]
                    return Claim(run, FolderLock(run), run, inside=True, notes=passed)
            elif not live and (run / CONFIG).exists() and is_finished(run):
                return _over(run, FolderLock(run))
        except FolderInUseError as error:  # locked since it was checked
            live.append(error)
        except OSError as error:
            notes.append(f"Passed over by resume=auto: {run} can't be used ({error.strerror})")
    if live:
        raise ValueError(f"resume=auto finds no other run of this config that was cut off, and {live[0]}")
    return Claim(own, _locked(own), notes=notes)


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
            saved = read_yaml((run / CONFIG).read_text(encoding="utf-8"))
        if saved is not None:
            check_config(saved, config)
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    return None


def _locked(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder)
    except OSError as error:
        raise ValueError(f"the run can't write to {folder} ({error.strerror}); set hydra.run.dir") from error


@contextmanager
def _released_on_error(lock: FolderLock) -> Iterator[FolderLock]:
    """Releases the lock if the block raises an error."""
    try:
        yield lock
    except BaseException:
        lock.close()
        raise


def is_finished(folder: Path) -> bool:
    """True if the folder's run has written summary and model; a summary that can't be read is a ValueError."""
    return bool(read_summary(folder).get("finished")) and (folder / MODEL).is_dir()
