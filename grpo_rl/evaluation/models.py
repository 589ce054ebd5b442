"""The folder of the model that `grpo-rl eval` is given by name, and the export of a checkpoint's model."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from grpo_rl.distributed.sharded_checkpoint import export_model
from grpo_rl.policies.before_loading import local_path
from grpo_rl.policies.generation import generation_config, leave_out_ignored, load_tokenizer
from grpo_rl.policies.hub import resolve_model, writing_model
from grpo_rl.policies.loading import load_whole, model_config, skeleton
from grpo_rl.policies.lora import saved_buffers
from grpo_rl.run.push import MODEL
from grpo_rl.storage.whole_file import whole_folder
from grpo_rl.training import checkpoint
from grpo_rl.training.checkpoint import CHECKPOINTS, checkpoints


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """The folder of a model: a folder, a hub name, a run's exported model or newest checkpoint, or a checkpoint.

    A checkpoint is exported into a temporary folder, removed at the end.

    Raises:
        ValueError: there is no such model, or the checkpoint is one of adapters.
    """
    path = local_path(name)
    if path and (path / MODEL / "config.json").is_file():
        path = path / MODEL
    elif path and path.is_dir() and (found := checkpoints(path / CHECKPOINTS)):
        path = found[-1]
    if path and path.is_file():
        with tempfile.TemporaryDirectory(prefix="grpo_rl_eval_") as folder:
            export_checkpoint(path, Path(folder, MODEL))
            yield Path(folder, MODEL)
        return
    yield resolve_model(str(path) if path else name)


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
    tokenizer = load_tokenizer(source, cfg["model"])
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
