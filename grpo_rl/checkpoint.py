"""Checkpoints: written atomically, loaded without running code, continued exactly."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from grpo_rl.parallel_checkpoint import load_shards, remove, remove_orphans, save_shards, set_aside

if TYPE_CHECKING:
    from grpo_rl.parallel import Ranks

PATTERN = "checkpoint_{step:06d}.pt"
MAY_DIFFER = (
    "resume",
    "logger",
    "mismatch",
    "evaluate.frequency",
    "train.checkpoint_frequency",
    "train.keep_checkpoints",
    "train.lineage",
    "train.max_bad_steps",
    "train_model.lora.export",
    "train_model.num_devices",
    "train_model.devices",
    "train_model.parallel",
    "train_model.cpu_offload",
    "train_model.timeout_s",
    "inference_model.num_devices",
    "inference_model.devices",
    "inference_model.tensor_parallel_size",
    "inference_model.gpu_memory_utilization",
    "inference_model.max_restarts",
    "inference_model.start_s",
    "inference_model.deadline_s",
    "inference_model.transfer",
    "inference_model.push_changes",
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

    Args:
        keep: newest checkpoints that stay, 0 for all; older ones are removed once this one is safe on disk.
        ranks: the processes that hold the state together, all of which call this, with a folder that all of them see.
            Sharded tensors go into ``checkpoint_<step>.shards`` beside the file; all else is that of rank 0.

    Raises:
        OSError: the disk is full or read-only; the checkpoints before are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PATTERN.format(step=step)
    if ranks:
        state = save_shards(path, state, ranks)
        if ranks.rank:
            ranks.wait()
            return path
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    for old in checkpoints(folder)[:-keep] if keep else []:
        remove(old)
    if ranks:
        ranks.wait()
    return path


def set_aside_later(folder: Path, step: int) -> None:
    """Sets aside checkpoints after ``step``, as ``.abandoned``, and removes what killed writes left.

    A run resumed at ``step`` takes another way, on which they must be neither found nor counted.
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
    """A checkpoint's state. Tensors, numbers and text only: no code runs.

    Args:
        ranks: those that go on with it, however many wrote it: each gets its part of what was sharded, and all of the
            rest. Alone, a process gets everything whole.

    Raises:
        ValueError: the file is no checkpoint of ours.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # torch raises RuntimeError, UnpicklingError, EOFError or KeyError, depending on where the file is broken.
        raise ValueError(f"{path} can't be read as a checkpoint: {error}") from error
    return load_shards(path, state, ranks)


def find(resume: str, outputs: Path) -> Path | None:
    """The checkpoint that ``resume`` names: a file, a run's folder, or ``auto``, the newest under ``outputs``.

    Returns:
        None for ``auto`` where there is none yet.

    Raises:
        ValueError: the file or folder is not there or holds no checkpoint.
    """
    if resume == "auto":
        found = sorted(outputs.glob("**/checkpoints/checkpoint_*.pt"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else None
    path = Path(resume)
    if path.is_file():
        return path
    inside = checkpoints(path / "checkpoints") or checkpoints(path)
    if not inside:
        raise ValueError(f"resume={resume}: no checkpoint there; give a checkpoint_*.pt, a run's folder, or auto")
    return inside[-1]


def check_config(saved: str, current: str) -> None:
    """Refuses a checkpoint of another config, except for keys that do not touch what is computed.

    Args:
        saved: the checkpoint's config as JSON.
        current: this run's.

    Raises:
        ValueError: names each key with both values.
    """
    before, now = flatten(json.loads(saved)), flatten(json.loads(current))
    # A schedule that does not decay is the same however long the run: it may be prolonged.
    may_differ = (*MAY_DIFFER, *(["train.total_dialog_turns"] if now.get("optimizer.schedule") == "constant" else []))
    different = [
        f"{key}: {before.get(key, 'absent')} in the checkpoint, {now.get(key, 'absent')} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == k or key.startswith(k + ".") for k in may_differ)
    ]
    if different:
        raise ValueError("the checkpoint is of another config:\n  " + "\n  ".join(different))


def flatten(tree: Mapping, prefix: str = "") -> dict:
    """Leaves of a nested mapping by dotted name.

    >>> flatten({"a": {"b": 1}, "c": []})
    {'a.b': 1, 'c': []}
    """
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, name + ".") if isinstance(value, Mapping) and value else {name: value})
    return flat
