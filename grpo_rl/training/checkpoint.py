"""Checkpoints: written atomically, loaded without running code, continued exactly; in the background."""

import math
import random
import re
import sys
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import cast

import numpy as np
import torch

from grpo_rl.distributed.ranks import Ranks, agreed
from grpo_rl.distributed.sharded_checkpoint import (
    check_shards,
    load_shards,
    remove,
    remove_orphans,
    remove_stale,
    save_shards,
    set_aside,
)
from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.storage import checkpoint_file
from grpo_rl.storage.whole_file import make_folder
from grpo_rl.training import logged
from grpo_rl.training.logged import LOGS, step_of
from grpo_rl.waits import waiting

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints inside the run's folder."""
PATTERN = "checkpoint_{step:06d}.pt"


def seed_rng(seed: int) -> None:
    """Seeds every generator that training draws from.

    As ``transformers.set_seed``, whose import brings peft and bitsandbytes along where they are installed.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict:
    """State of every generator that training draws from, as plain tensors, numbers and lists."""
    version, words, gauss = random.getstate()
    name, numbers, position, has_gauss, cached = cast(tuple, np.random.get_state(legacy=True))
    state = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [name, numbers.tolist(), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict) -> None:
    """Restores what :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, numbers, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(numbers, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])  # there may be fewer than before


def with_own_rng(state: dict, ranks: Ranks | None) -> dict:
    """A checkpoint's state with that of this rank's generators; with rank zero's where other ranks wrote it."""
    rng_states = state.get("rng_of_ranks") or []  # of one process
    return {**state, "rng": rng_states[ranks.rank]} if ranks and len(rng_states) == ranks.size else state


def save(folder: Path, step: int, state: Mapping, keep: int = 2, ranks: Ranks | None = None) -> Path:
    """Writes ``checkpoint_<step>.pt``; readers see the whole file or none.

    A checkpoint of the same step that is there already is good until this one takes its place.

    Args:
        keep: newest checkpoints that stay, 0 for all; older ones are removed once this one is safe on disk.
        ranks: the processes that hold the state together, all of which call this, with a folder that all of them see.
            Sharded tensors go into ``checkpoint_<step>.shards`` next to the file; all else is that of rank zero.

    Raises:
        OSError: the disk is full or read-only; the checkpoints before are untouched. All ranks raise it.
    """
    path = folder / PATTERN.format(step=step)
    rank_zero = ranks is None or ranks.rank == 0

    def commit() -> None:
        if rank_zero:
            checkpoint_file.write(path, state)
            remove_stale(path, state)
            keep_newest(folder, keep)

    try:
        agreed(ranks, lambda: make_folder(folder) if rank_zero else None)
        state = save_shards(path, state, ranks) if ranks else state
        agreed(ranks, commit)
    except OSError:
        if rank_zero:  # room for another try
            remove_stale(path, checkpoint_file.read(path) if path.exists() else {})
        raise
    return path


def keep_newest(folder: Path, keep: int) -> None:
    """Removes older checkpoints than the ``keep`` newest; 0 keeps all.

    :func:`save` does so, and a resumed run, as a kill can come before :func:`save` gets there.
    """
    for old in checkpoints(folder)[:-keep] if keep else []:
        remove(old)


def remove_all(folder: Path) -> None:
    """Removes every checkpoint in a folder."""
    for path in checkpoints(folder):
        remove(path)


def sync_logs(run: Path, step: int, metrics_bytes: int) -> dict[str, int]:
    """Lengths of what a run had logged by a step, once it is on the disk; see `grpo_rl.training.logged`."""
    before = [at for at in map(step_of, checkpoints(run / CHECKPOINTS)) if at < step]
    return logged.sync_logs(run, max(before, default=-1), step, metrics_bytes)


def set_aside_later(folder: Path, step: int) -> None:
    """Sets aside checkpoints after ``step``, as ``.abandoned``, and removes what killed writes left.

    A run resumed at ``step`` diverges from them, so they must be neither found nor counted.
    """
    for path in checkpoints(folder):
        if _order(path) > _order(folder / PATTERN.format(step=step)):
            set_aside(path)
    for partial in folder.glob("checkpoint_*.partial"):
        partial.unlink()
    remove_orphans(folder)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in a folder, oldest first."""
    return sorted(folder.glob("checkpoint_*.pt"), key=_order)


def _order(path: Path) -> tuple[float, str]:
    """A copy under a name without a step comes last, so that no newer checkpoint has it removed."""
    return (step if (step := step_of(path)) >= 0 else math.inf), path.name


def load(path: Path, ranks: Ranks | None = None) -> dict:
    """A checkpoint's state, once all its files have proved to be as they were written. No code in them runs.

    Args:
        ranks: those that go on with it, however many wrote it: each gets its part of what was sharded, and all of the
            rest. Alone, a process gets everything whole.

    Raises:
        ValueError: it is damaged or no checkpoint of ours; names the newest good one. All ranks raise it.
    """
    try:
        return _load(path, ranks)
    except ValueError as error:
        remedy = _remedy(path) if ranks is None or ranks.rank == 0 else ""
        raise ValueError(f"{error}; {ranks.broadcast(remedy) if ranks else remedy}") from error


def _load(path: Path, ranks: Ranks | None) -> dict:
    rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
    try:
        state = agreed(ranks, lambda: _verified(path, rank, size))
        return agreed(ranks, lambda: load_shards(path, state, ranks))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} can't be read as a checkpoint: {error}") from error


def _verified(path: Path, rank: int = 0, size: int = 1) -> dict:
    """A checkpoint's own file; its contents and shards, each read by one rank, are as they were written."""
    if rank == 0:
        checkpoint_file.check(path)
    state = checkpoint_file.read(path)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__} and no state")
    step = state.get("step", step_of(path))
    if re.fullmatch(r"checkpoint_\d+\.pt", path.name) and step != step_of(path):
        raise ValueError(f"it is the checkpoint of step {step} under another's name")
    check_shards(path, state, rank, size)
    return state


def _remedy(path: Path) -> str:
    for other in reversed(checkpoints(path.parent)):
        if other.name != path.name:
            with suppress(ValueError, OSError):
                _verified(other)
                return f"the newest good one next to it is {other}"
    return "there is no good one next to it"


def restore(resume: str | Path, run: Path | None = None, ranks: Ranks | None = None) -> tuple[Path, dict]:
    """The checkpoint that a run goes on with, and its state; all ranks get the same one.

    From a folder, it is the newest whole checkpoint whose run's logs are as they were when it was written, which a
    power cut or a bad disk can change. Skipped checkpoints are reported with the reason. A checkpoint that is named
    itself is used, with a gap in the logs if need be, or refused.

    Args:
        resume: a checkpoint, or a folder that has some, itself or in ``checkpoints``.
        run: the folder of the run that wrote them, with its logs; None: they lie elsewhere.
        ranks: the processes that go on with it, all of which call this.

    Raises:
        ValueError: nothing that ``resume`` names can be used; with the reason and a remedy.
    """
    place = Path(resume).absolute()
    rank_zero = ranks is None or ranks.rank == 0

    def look() -> tuple[list[Path], bool]:
        paths = [place] if place.is_file() else checkpoints(place / CHECKPOINTS) or checkpoints(place)
        if not paths:
            raise ValueError(f"resume={place}: no checkpoint there; give a checkpoint_*.pt, a run's folder, or auto")
        return paths[::-1], place.is_file()

    # Rank zero looks: what others see of a shared disk may be older.
    found = agreed(ranks, lambda: look() if rank_zero else ([], False))
    paths, named = ranks.broadcast(found) if ranks else found
    notes = []
    for path in paths:
        # Before gigabytes are hashed.
        damage = agreed(ranks, lambda path=path: damaged_logs(run, path) if rank_zero and run else None)
        if damage := ranks.broadcast(damage) if ranks else damage:
            notes.append(f"{'going on with a gap' if named else 'passed over'}: {path}: {damage}")
            if not named:
                continue
        try:
            state = load(path, ranks) if named else _load(path, ranks)
            if "step" not in state:
                held = ", ".join(map(str, state)) or "nothing"
                raise ValueError(f"{path} is no checkpoint of a run: it holds {held}")
        except ValueError as error:
            if named:
                raise
            notes.append(f"passed over: {error}")
            continue
        if rank_zero and notes:
            print("\n".join([*notes, f"resume={resume}: going on with {path}"]), file=sys.stderr, flush=True)
        return path, state
    reasons = "\n  ".join(notes)
    raise ValueError(
        f"resume={resume}: no checkpoint can be used; to start anew, set resume=null and another hydra.run.dir; to go "
        f"on with one that is whole without the logs before it, give its file\n  {reasons}"
    )


def damaged_logs(run: Path, path: Path) -> str | None:
    """Names a log of a checkpoint's run that has changed since the checkpoint was written; None: none has."""
    listed, step = {}, step_of(path)
    # The checkpoint itself may be damaged, which is found out when it is loaded.
    with suppress(ValueError, TypeError, LookupError, AttributeError):
        listed = {str(name): int(length) for name, length in checkpoint_file.read(path)[LOGS].items()}
        if METRICS_FILE not in listed and step > 0:
            return f"it was written without {METRICS_FILE}, as where its run's folder is moved or removed"
    return logged.damaged(run, listed, step)


class Background:
    """Does one piece of work at a time in a thread.

    >>> done = []
    >>> background = Background(); background.start(lambda: done.append(1)); background.wait(); done
    [1]
    """

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._work: futures.Future[object] | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begins the work, once the one before has ended, whose failure is raised."""
        self.wait()
        self._work = self._thread.submit(work)

    def wait(self) -> None:
        """Returns when nothing is under way; the failure of what was is raised once."""
        if work := self._work:
            with waiting("a checkpoint on the disk"):
                futures.wait([work])  # Ctrl-C may break this off: the work is then still known
            self._work = None
            work.result()

    def close(self) -> None:
        """Waits, and ends the thread; the next :meth:`wait` raises a failure."""
        with waiting("a checkpoint on the disk"):
            self._thread.shutdown()
