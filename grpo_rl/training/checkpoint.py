"""Checkpoints: written atomically, loaded without running code, continued exactly."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Mapping
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
from grpo_rl.monitor.lineage import RESPONSES, TOKENS
from grpo_rl.monitor.metrics import METRICS_FILE, read_metrics
from grpo_rl.monitor.step_parts import STEP_FOLDERS
from grpo_rl.storage import checkpoint_file
from grpo_rl.storage.dotted import flat
from grpo_rl.storage.masking import masked
from grpo_rl.storage.whole_file import make_folder, sync
from grpo_rl.training.former_settings import IGNORED, REMOVED

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints inside the run's folder."""
PATTERN = "checkpoint_{step:06d}.pt"
MAY_DIFFER = (
    "resume",
    "logger",
    "mismatch",
    "evaluate.frequency",
    "evaluate.samples",
    "evaluate.temperature",
    "evaluate.tasks",
    "evaluate.keep_best",
    "evaluate.patience",
    "evaluate.score",
    "env.isolated",
    "env.score_timeout_s",
    "train.checkpoint_frequency",
    "train.elastic",
    "train.keep_checkpoints",
    "train.keep_final_checkpoint",
    "train.gradient_accumulation_steps",
    "train.lineage",
    "train.max_bad_steps",
    "train.micro_batch_tokens",
    "train_model.gradient_checkpointing",
    "train_model.lora.export",
    "train_model.num_devices",
    "train_model.devices",
    "train_model.parallel",
    "train_model.cpu_offload",
    "train_model.timeout_s",
    "train_model.deadline_s",
    "inference_model.num_devices",
    "inference_model.devices",
    "inference_model.tensor_parallel_size",
    "inference_model.gpu_memory_utilization",
    "inference_model.max_restarts",
    "inference_model.deadline_s",
    "inference_model.transfer",
    "ray",
)
"""Config keys that a resumed run may change: none of them touches what is computed, but for rounding."""


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
        torch.cuda.set_rng_state_all(state["cuda"])


def save(folder: Path, step: int, state: Mapping, keep: int = 2, ranks: Ranks | None = None) -> Path:
    """Writes ``checkpoint_<step>.pt``; whoever looks sees the whole file or none.

    A checkpoint of the same step that is there already is good until this one takes its place.

    Args:
        keep: newest checkpoints that stay, 0 for all; older ones are removed once this one is safe on disk.
        ranks: the processes that hold the state together, all of which call this, with a folder that all of them see.
            Sharded tensors go into ``checkpoint_<step>.shards`` beside the file; all else is that of rank zero.

    Raises:
        OSError: the disk is full or read-only; the checkpoints before are untouched. All ranks raise it.
    """
    path = folder / PATTERN.format(step=step)
    rank_zero = ranks is None or ranks.rank == 0

    def commit() -> None:
        if rank_zero:
            checkpoint_file.write(path, state)
            remove_stale(path, state)
            for old in checkpoints(folder)[:-keep] if keep else []:
                remove(old)

    try:
        agreed(ranks, lambda: make_folder(folder) if rank_zero else None)
        state = save_shards(path, state, ranks) if ranks else state
        agreed(ranks, commit)
    except OSError:
        if rank_zero:  # room for whoever tries again
            remove_stale(path, checkpoint_file.read(path) if path.exists() else {})
        raise
    return path


def remove_all(folder: Path) -> None:
    """Removes every checkpoint in a folder."""
    for path in checkpoints(folder):
        remove(path)


def sync_logs(run: Path) -> None:
    """Returns when what a run has logged is on the disk: a checkpoint must not outlive the steps that led to it.

    Called before every checkpoint. Files of steps before the newest one are on the disk since then.

    Args:
        run: the run's folder.
    """
    last = max((step_of(path) for path in checkpoints(run / CHECKPOINTS)), default=-1)
    for name in (*STEP_FOLDERS, TOKENS, RESPONSES):
        written = [path for path in (run / name).glob("[!.]*.parquet") if step_of(path) > last]
        for path in written:
            sync(path)
        if written:
            sync(run / name)
    if (run / METRICS_FILE).exists():
        sync(run / METRICS_FILE)
    sync(run)


def step_of(path: Path) -> int:
    """The step that a file is named by; -1 where it is named otherwise.

    >>> step_of(Path("checkpoint_000012.pt")), step_of(Path("part-00000003.parquet")), step_of(Path("copied.pt"))
    (12, 3, -1)
    """
    number = re.search(r"\d+", path.name)
    return int(number[0]) if number else -1


def set_aside_later(folder: Path, step: int) -> None:
    """Sets aside checkpoints after ``step``, as ``.abandoned``, and removes what killed writes left.

    A run resumed at ``step`` diverges from them, so they must be neither found nor counted.
    """
    for path in checkpoints(folder):
        if path.name > PATTERN.format(step=step):
            set_aside(path)
    for partial in folder.glob("checkpoint_*.partial"):
        partial.unlink()
    remove_orphans(folder)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in a folder, oldest first."""
    return sorted(folder.glob("checkpoint_*.pt"))


def load(path: Path, ranks: Ranks | None = None) -> dict:
    """A checkpoint's state, once all its files have proved to be as they were written. No code in them runs.

    Args:
        ranks: those that go on with it, however many wrote it: each gets its part of what was sharded, and all of the
            rest. Alone, a process gets everything whole.

    Raises:
        ValueError: it is damaged or no checkpoint of ours; names the newest good one beside it. All ranks raise it.
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
    """A checkpoint's own file, whose contents and sharded tensors, each of them on one rank, are as they were written.

    Raises:
        ValueError: they are not.
        OSError: they can't be read.
    """
    has_digest = rank > 0 or checkpoint_file.check(path)
    state = checkpoint_file.read(path)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__} and no state")
    check_shards(path, state, rank, size)
    if not has_digest:
        _say(f"{path} was written by an earlier version, without a SHA-256: only its CRC-32s were compared")
    return state


def _remedy(path: Path) -> str:
    for other in reversed(checkpoints(path.parent)):
        if other.name != path.name:
            with suppress(ValueError, OSError):
                _verified(other)
                return f"the newest good one beside it is {other}"
    return "there is no good one beside it"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def last_logged(run: Path) -> int:
    """The last step in a run's metrics; 0 where there is none.

    Raises:
        ValueError: a line is not one of metrics; names it.
    """
    return max((int(row["step"]) for row in read_metrics(run)), default=0) if (run / METRICS_FILE).exists() else 0


def restore(resume: str | Path, run: Path | None = None, ranks: Ranks | None = None) -> tuple[Path, dict]:
    """The checkpoint that a run goes on with, and its state; all ranks get the same one.

    From a folder, it is the newest complete checkpoint whose steps are all in ``metrics.jsonl``; skipped checkpoints
    are reported with the reason. A checkpoint that is named itself is used or refused.

    Args:
        resume: a checkpoint, or a folder that has some, itself or in ``checkpoints``.
        run: the folder of the run that wrote them, whose metrics have to reach them; None: they lie elsewhere.
        ranks: the processes that go on with it, all of which call this.

    Raises:
        ValueError: nothing that ``resume`` names can be used; says why, and what to do. Or metrics can't be read.
    """
    place = Path(resume).absolute()
    rank_zero = ranks is None or ranks.rank == 0

    def look() -> tuple[list[Path], bool, float]:
        paths = [place] if place.is_file() else checkpoints(place / CHECKPOINTS) or checkpoints(place)
        if not paths:
            raise ValueError(f"resume={place}: no checkpoint there; give a checkpoint_*.pt, a run's folder, or auto")
        return paths[::-1], place.is_file(), math.inf if run is None else last_logged(run)

    # Rank zero looks: what others see of a shared disk may be older.
    found = agreed(ranks, lambda: look() if rank_zero else ([], False, 0.0))
    paths, named, logged = ranks.broadcast(found) if ranks else found
    told = []
    for path in paths:
        if logged < (step := step_of(path)):  # as a power cut can leave them
            told.append(
                f"{'going on with a gap' if named else 'passed over'}: {path} is of step {step}, and "
                f"{run}/{METRICS_FILE} ends at step {logged}: the rest is lost"
            )
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
            told.append(f"passed over: {error}")
            continue
        if rank_zero and told:
            _say("\n".join([*told, f"resume={resume}: going on with {path}"]))
        return path, state
    reasons = "\n  ".join(told)
    raise ValueError(
        f"resume={resume}: no checkpoint can be used; to start anew, set resume=null and another hydra.run.dir; to go "
        f"on with one that only lacks metrics, give its file\n  {reasons}"
    )


def length_setting(config: Mapping[str, object]) -> str:
    """The setting that says how long a run is, and that prolongs a finished one; of a config by dotted names.

    >>> length_setting({"mode": "sft"}), length_setting({"mode": "sync"})
    ('train.epochs', 'train.total_dialog_turns')
    """
    return "train.epochs" if config.get("mode") == "sft" else "train.total_dialog_turns"


def check_config(saved: str, current: str) -> None:
    """Refuses a checkpoint of another config, except for keys that do not touch what is computed.

    Args:
        saved: the checkpoint's config as JSON.
        current: this run's.

    Raises:
        ValueError: names each key with both values.
    """
    # Earlier versions wrote secrets, too: masked, they are those of this version.
    before, now = (
        flat({name: masked(value, name, told_apart=True) for name, value in json.loads(config).items()})
        for config in (saved, current)
    )
    before = {k: v for k, v in before.items() if k not in IGNORED and (k not in REMOVED or v != REMOVED[k])}
    # A schedule that does not decay is the same however long the run: it may be prolonged.
    may_differ = (*MAY_DIFFER, *([length_setting(now)] if now.get("optimizer.schedule") == "constant" else []))
    different = [
        f"{key}: {before.get(key, 'absent')} in the checkpoint, {now.get(key, 'absent')} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == k or key.startswith(k + ".") for k in may_differ)
    ]
    if different:
        raise ValueError("the checkpoint is of another config:\n  " + "\n  ".join(different))
