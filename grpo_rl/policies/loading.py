"""A model from a local folder: with its weights, quantised weights, or only names and shapes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_rl.policies.adapters import LoRA, Quantization
from grpo_rl.policies.generation import generation_config, leave_out_ignored
from grpo_rl.policies.lora import check_readable, last_names, targeted
from grpo_rl.policies.routing import check_replay
from grpo_rl.policies.supported import refuse_unsupported
from grpo_rl.policies.text_part import from_folder, model_config


def check_model(folder: str | Path, lora: LoRA | None = None, router_replay: bool = False) -> None:
    """Checks that `TrainPolicy.load` can train the folder's model, without reading its weights.

    Args:
        lora: adapters that are trained instead of the model, if their rank is more than 0.
        router_replay: its routers have to take the experts that a sampler chose.

    Raises:
        ValueError: the model would be scored wrongly, the adapters' targets do not fit it, peft could not read
            their folder, or its routers can't replay.
    """
    model = skeleton(folder)
    refuse_unsupported(model)
    if lora and lora.rank:
        names = targeted(model, lora.targets)
        if lora.export == "adapter":
            check_readable(model, names)
    if router_replay:
        check_replay(model)


def check_written(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Writes the folder's model without its weights to a temporary folder, as a finished run writes its own.

    Returns:
        Entries of the generation config that transformers ignores, and that are not written.

    Raises:
        ValueError: transformers refuses to write one of them, which is named, with the reason.
    """
    sampled = generation_config(folder)
    ignored = leave_out_ignored(sampled)
    parts = {"config.json": model_config(folder), "generation_config.json": sampled, "tokenizer.json": tokenizer}
    with tempfile.TemporaryDirectory() as place:
        for file, part in parts.items():
            try:
                part.save_pretrained(place)
            except Exception as error:  # the libraries raise errors of any kind
                why = " ".join(str(error).split())
                raise ValueError(f"{Path(folder) / file} could not be written with the trained model: {why}") from error
    return ignored


def skeleton(folder: str | Path) -> PreTrainedModel:
    """The folder's model, or the text part of several, on the meta device: names and shapes without weights.

    Raises:
        ValueError: the folder holds several models, and the text can't be taken out of them.
    """
    config = model_config(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def target_names(folder: str | Path, lora: LoRA) -> list[str]:
    """Last names of the layers that the adapters target in the folder's model, without reading its weights.

    Raises:
        ValueError: a target selects none; lists the choices.
    """
    return last_names(targeted(skeleton(folder), lora.targets))


def load_whole(folder: str | Path, **settings: Any) -> PreTrainedModel:
    """The folder's model, or the text part of several, with all of its weights.

    transformers alone would fill missing ones with random numbers; ``settings`` are those of its ``from_pretrained``.

    Raises:
        ValueError: the folder lacks weights, or they have other shapes than in its config; names them.
    """
    model, found = from_folder(folder, output_loading_info=True, ignore_mismatched_sizes=True, **settings)
    if wrong := sorted(found["mismatched_keys"]):
        name, held, expected = wrong[0]
        raise ValueError(
            f"{folder} holds {name} with shape {list(held)}, and its config.json asks for {list(expected)} "
            f"({len(wrong)} such weights): they are not of the same model; fetch or copy it again"
        )
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{folder} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}{more}: fetch or copy it again"
        )
    leave_out_ignored(model.generation_config)
    return model


def load_quantized(
    folder: str | Path, quantization: Quantization, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """The folder's model with its linear layers, except for the head, in 4 or 8 bits, other weights in ``dtype``.

    Source of nf4 and of quantised scales: QLoRA, https://arxiv.org/abs/2305.14314, section 3; of int8 (whose inputs
    are rounded to 8 bits too): LLM.int8(), https://arxiv.org/abs/2208.07339.

    Raises:
        ValueError: the folder lacks weights.
    """
    settings = (
        BitsAndBytesConfig(load_in_8bit=True)
        if quantization == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=True,
        )
    )
    return load_whole(folder, dtype=dtype, quantization_config=settings, device_map={"": torch.device(device)})
