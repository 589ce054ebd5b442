"""A run's folder: whether it can be used, and the model that a run leaves in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_rl import checkpoint
from grpo_rl.build import make_tokenizer
from grpo_rl.models import resolve_model, writing_model
from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.parallel import Ranks, gathered
from grpo_rl.parallel_checkpoint import export_model
from grpo_rl.policies.lora import has_adapters
from grpo_rl.weights.sources import export_merged, source_of

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""fp32 weights and AdamW's two moments."""


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
    """Writes the model for ``from_pretrained``; our attention's name must not travel with it.

    Args:
        adapters: what to do with a model's adapters: ``merged`` into its weights, which takes the host a copy of them,
            or the ``adapter`` alone, as peft saves it.
        ranks: the processes that hold the model together, all of which call this; rank 0 writes.

    Raises:
        OSError: the disk is full or read-only; names the folder.
    """
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        weights = {}
        if ranks and ranks.in_step:
            weights = gathered(source_of(model, takes_adapters=False).moving(), ranks.rank)
        if ranks and ranks.rank:
            return
        with writing_model(folder):
            if weights:
                export_model(weights, model.config, folder, model.config.dtype, model.generation_config)
            elif has_adapters(model) and adapters == "merged":
                export_merged(model, folder)
            else:
                model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    finally:
        model.set_attn_implementation(attention)


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
        raise OSError(error.errno, f"{error.strerror}; {remedy}", error.filename) from error
