"""A run's folder: which it is, whether it can be used, and the model that a run leaves in it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_rl import checkpoint
from grpo_rl.build import make_tokenizer
from grpo_rl.checkpoint import CHECKPOINTS
from grpo_rl.models import resolve_model, writing_model
from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.monitor.report import read_summary
from grpo_rl.parallel import Ranks, gathered
from grpo_rl.parallel_checkpoint import export_model
from grpo_rl.policies.lora import has_adapters
from grpo_rl.run_lock import LOCK, FolderInUseError, FolderLock
from grpo_rl.weights.sources import export_merged, source_of

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""


class RunIsOver(Exception):
    """The run to go on with has nothing left to do, and has said so."""


@dataclass
class Claim:
    """A run's folder, locked, and how the run starts there.

    Args:
        folder: that the run writes to.
        lock: held until the run ends.
        resume: the checkpoint, or the folder that has one, to go on from; None: from the beginning.
        again: from the beginning in a folder whose run was cut off before its first checkpoint; what that left goes.
        notes: what to tell.
    """

    folder: Path
    lock: FolderLock
    resume: Path | None = None
    again: bool = False
    notes: list[str] = field(default_factory=list)


def claim(own: Path, resume: str | None, outputs: Path) -> Claim:
    """The folder that a run writes to, which from now on no other process can.

    ``auto`` is the newest run under ``outputs`` that has a checkpoint; where there is none, a new one. A run that
    another process is at is passed over for the newest one that was cut off, and never for a new or a finished one.

    Args:
        own: the folder for a new run.
        resume: a checkpoint, the folder of a run, ``auto``, or None for a new run.

    Raises:
        ValueError: another process writes there, or it can't be written; says what to do.
    """
    if resume == "auto":
        return _newest(outputs) or Claim(own, _locked(own))
    if resume is None:
        return Claim(own, _locked(own))
    place = Path(resume)
    if place.is_file():
        in_a_run = place.parent.name == CHECKPOINTS
        folder = place.parent.parent if in_a_run else own
        return Claim(folder, _locked(folder), place)
    if checkpoint.checkpoints(place) and not checkpoint.checkpoints(place / CHECKPOINTS):
        folder = place.parent if place.name == CHECKPOINTS else own
        return Claim(folder, _locked(folder), place)
    is_run = any((place / name).exists() for name in (CHECKPOINTS, METRICS_FILE, LOCK))
    if not is_run and place.resolve() != own.resolve():
        return Claim(own, _locked(own), place)  # which `checkpoint.find` refuses
    lock = _locked(place)
    if checkpoint.checkpoints(place / CHECKPOINTS):
        return Claim(place, lock, place)
    notes = [f"The run in {place} was cut off before its first checkpoint, and begins again"] * is_run
    return Claim(place, lock, again=True, notes=notes)


def _newest(outputs: Path) -> Claim | None:
    """The newest run under ``outputs`` that has a checkpoint and no other process is at."""
    newest: dict[Path, float] = {}
    for path in outputs.glob(f"**/{CHECKPOINTS}/checkpoint_*.pt"):
        run = path.parent.parent
        newest[run] = max(newest.get(run, 0.0), path.stat().st_mtime)
    for path in outputs.glob(f"**/{LOCK}"):  # of runs that have no checkpoint yet: another process may be at them
        newest.setdefault(path.parent, path.stat().st_mtime)
    live: list[FolderInUseError] = []
    for run in sorted(newest, key=lambda run: newest[run], reverse=True):
        try:
            lock = _locked(run)
        except FolderInUseError as error:
            live.append(error)
            continue
        if checkpoint.checkpoints(run / CHECKPOINTS) and not (live and is_finished(run)):
            return Claim(run, lock, run, notes=[f"Passed over by resume=auto: {error}" for error in live])
        lock.close()
    if live:
        raise ValueError(f"resume=auto finds no other run that was cut off, and {live[0]}")
    return None


def _locked(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder)
    except OSError as error:
        raise ValueError(f"the run can't write to {folder} ({error.strerror}); set hydra.run.dir") from error


def is_finished(folder: Path) -> bool:
    """Whether the run in the folder has come to its end: all parts of it are there, but for the report perhaps.

    Raises:
        ValueError: its summary can't be read.
    """
    return bool(read_summary(folder).get("finished"))


def check_folder(folder: Path, cfg: DictConfig, model_bytes: int, resumed: bool) -> None:
    """Refuses a folder that a run can't use.

    Args:
        model_bytes: size of the model's files.
        resumed: the run goes on in the folder.

    Raises:
        ValueError: it holds a run already, can't be written, or its disk has no room for checkpoints and the model.
    """
    if not resumed and (folder / METRICS_FILE).exists():
        raise ValueError(f"{folder} already holds a run; go on with it (resume={folder}) or set another hydra.run.dir")
    probe = folder / ".write_probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"the run can't write to {folder} ({error.strerror}); set hydra.run.dir") from error
    checkpoints = 1 + cfg.train.keep_checkpoints  # one more while the next is written
    reference = {"never": 0, "average": 4}.get(cfg.ref_model.refresh, 2)  # bytes of a parameter, when renewed
    # Checkpoints of adapters are small beside the model.
    parameters = 0 if cfg.train_model.lora.rank else model_bytes / 2
    needed = parameters * (CHECKPOINT_BYTES_PER_PARAMETER + reference) * checkpoints + model_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder} has {free / 2**30:.1f} GiB free, and {checkpoints} checkpoints and the exported model "
            f"take about {needed / 2**30:.1f} GiB; free some space or set hydra.run.dir"
        )


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    adapters: str = "merged",
    ranks: Ranks | None = None,
) -> None:
    """Writes the model for ``from_pretrained``, whole or not at all; our attention's name must not travel with it.

    Args:
        adapters: what to do with a model's adapters: ``merged`` into its weights, which takes the host a copy of them,
            or the ``adapter`` alone, as peft saves it.
        ranks: the processes that hold the model together, all of which call this; rank 0 writes.

    Raises:
        OSError: the disk is full or read-only; names the folder.
    """
    attention = model.config._attn_implementation
    partial = folder.with_name(f"{folder.name}.partial")
    if not (ranks and ranks.rank):
        shutil.rmtree(partial, ignore_errors=True)  # that a killed run left
    model.set_attn_implementation("sdpa")
    try:
        weights = {}
        if ranks and ranks.in_step:
            weights = gathered(source_of(model, takes_adapters=False).moving(), ranks.rank)
        if ranks and ranks.rank:
            return
        with writing_model(partial):
            if weights:
                export_model(weights, model.config, partial, model.config.dtype, model.generation_config)
            elif has_adapters(model) and adapters == "merged":
                export_merged(model, partial)
            else:
                model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        model.set_attn_implementation(attention)
    _take_place(partial, folder)


def _take_place(partial: Path, folder: Path) -> None:
    """Gives a whole folder its name, where an older one may stand; its files are safe on the disk before that."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def export_checkpoint(path: Path, folder: Path) -> None:
    """Writes the model of a checkpoint, sharded or not, as a run does at its end; one process does it, on the CPU.

    Raises:
        ValueError: it is no checkpoint, or one of adapters; the folder holds something; the model that training began
            with, whose config and tokenizer go along, is not there.
        OSError: the disk is full or read-only; what was written until then is removed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty; give another folder")
    state = checkpoint.load(path)
    masters, cfg = state["optimizer"]["masters"], json.loads(state["config"])
    if any(".lora_" in name for name in masters):
        raise ValueError(f"{path} is of adapters, without the model under them; the run's own folder model/ has both")
    source = resolve_model(cfg["model"]["name"])
    config, of_sampling = AutoConfig.from_pretrained(source), None
    if (source / "generation_config.json").is_file():
        of_sampling = GenerationConfig.from_pretrained(source)
    tokenizer = make_tokenizer(source, cfg["model"]["chat_template"])
    try:
        with writing_model(folder):
            export_model(masters, config, folder, getattr(torch, cfg["train_model"]["dtype"]), of_sampling)
            tokenizer.save_pretrained(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # a part of a model could be taken for one
        remedy = "free some space or give another folder"
        raise OSError(error.errno, f"{error.strerror or error}; {remedy}", error.filename) from error
