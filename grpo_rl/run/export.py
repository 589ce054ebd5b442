"""Exports a run's final model, or a checkpoint's, in the format that ``from_pretrained`` reads."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_rl.distributed.ranks import Ranks, gathered
from grpo_rl.distributed.sharded_checkpoint import export_model
from grpo_rl.policies.hub import generation_config, leave_out_ignored, load_tokenizer, resolve_model, writing_model
from grpo_rl.policies.loading import load_whole, model_config, skeleton
from grpo_rl.policies.lora import has_adapters, saved_buffers
from grpo_rl.storage.whole_file import whole_folder
from grpo_rl.training import checkpoint
from grpo_rl.weights.push import export_merged, merged_weights


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    adapters: str = "merged",
    ranks: Ranks | None = None,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Writes the model for ``from_pretrained``, whole or not at all, and without the name of our own attention.

    Args:
        adapters: ``merged`` merges adapters into the weights, which needs a copy of them in host memory; ``adapter``
            writes the adapters alone, as peft does.
        ranks: the processes that hold the model together, all of which call this; rank 0 writes.
        beside: further files, by name, that are there once the model is.

    Raises:
        OSError: the disk is full or read-only; names the folder.
    """
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        weights = gathered(merged_weights(model), ranks.rank) if ranks and ranks.in_step else {}
        if ranks and ranks.rank:
            return
        with whole_folder(folder) as partial, writing_model(partial):
            if weights:
                export_model(weights, model.config, partial, model.config.dtype, model.generation_config)
            elif has_adapters(model) and adapters == "merged":
                export_merged(model, partial)
            else:
                model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            for name, content in (beside or {}).items():
                (partial / name).write_text(content)
    finally:
        model.set_attn_implementation(attention)


def export_checkpoint(path: Path, folder: Path) -> None:
    """Writes the model of a checkpoint, sharded or not, as a finished run does, in one process on the CPU.

    Raises:
        ValueError: the path is no checkpoint, or one of adapters; the folder is not empty; the initial model, which
            gives config, tokenizer and what is not trained, is missing.
        OSError: the disk is full or read-only; the partial folder is removed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty; give another folder")
    state = checkpoint.load(path)
    masters, cfg = state["optimizer"]["masters"], json.loads(state["config"])
    if any(".lora_" in name for name in masters):
        raise ValueError(f"{path} is of adapters, without the model under them; the run's own folder model/ has both")
    source = resolve_model(cfg["model"]["name"])
    config, of_sampling = model_config(source), generation_config(source)
    leave_out_ignored(of_sampling)
    tokenizer = load_tokenizer(source, cfg["model"]["chat_template"])
    dtype = getattr(torch, cfg["train_model"]["dtype"])
    weights = dict(masters)
    if saved_buffers(skeleton(source)):  # they are not trained, so that the optimizer does not have them
        weights |= saved_buffers(load_whole(source, dtype=dtype))
    try:
        with whole_folder(folder) as partial, writing_model(partial):
            export_model(weights, config, partial, dtype, of_sampling)
            tokenizer.save_pretrained(partial)
    except OSError as error:
        remedy = "free some space or give another folder"
        raise OSError(error.errno, f"{error.strerror or error}; {remedy}", error.filename) from error
