"""Exports a run's final model in the format that ``from_pretrained`` reads."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_rl.distributed.ranks import Ranks, gathered
from grpo_rl.distributed.sharded_checkpoint import export_model
from grpo_rl.policies.hub import writing_model
from grpo_rl.policies.lora import has_adapters
from grpo_rl.storage.whole_file import whole_folder
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
