"""A run's folder: whether it can be used, and the model that a run leaves in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_rl.monitor.metrics import METRICS_FILE
from grpo_rl.policies.lora import has_adapters
from grpo_rl.weights.sources import export_merged

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


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, adapters: str = "merged") -> None:
    """Writes the model for ``from_pretrained``; our attention's name must not travel with it.

    Args:
        adapters: what to do with a model's adapters: ``merged`` into its weights, which takes the host a copy of them,
            or the ``adapter`` alone, as peft saves it.
    """
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        if has_adapters(model) and adapters == "merged":
            export_merged(model, folder)
        else:
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        model.set_attn_implementation(attention)
