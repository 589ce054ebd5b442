"""The text part of a checkpoint of several models in one, such as text and vision: it is trained and sampled alone."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from grpo_rl.policies.hub import weight_names
from grpo_rl.policies.probe import measured_logits

HEAD = "lm_head."
RENAMED = {
    r"^language_model\.lm_head\.": HEAD,
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""Beginnings of the text part's weights in such checkpoints -> in a checkpoint of it alone."""
OF_THE_WHOLE = ("dtype", "quantization_config", "eos_token_id")
"""Settings that the whole's config gives for its text part too."""


def model_config(folder: str | Path) -> PreTrainedConfig:
    """The config of the model that is trained from the folder, which for several models in one is that of the text.

    Args:
        folder: a local folder, or a name on the hub whose config is there.

    Raises:
        ValueError: the folder holds several models, and the text can't be taken out of them.
    """
    return text_part(folder) or AutoConfig.from_pretrained(folder)


def text_part(folder: str | Path) -> PreTrainedConfig | None:
    """The config of the causal language model inside several models in one; None for a checkpoint of one model."""
    whole = AutoConfig.from_pretrained(folder)
    if (found := whole.get_text_config()) is whole:
        return None
    several = f"{folder} holds several models in one ({', '.join(whole.sub_configs)})"
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{several}, and transformers has no causal language model of a {type(found).__name__} alone")
    text: Any = copy.deepcopy(found)
    try:
        text.architectures, tied = _check_inside(whole, text)
    except ValueError as error:
        raise ValueError(f"{several}, and its text can't be taken out of it: {error}") from error
    # With a head among its weights, such a checkpoint is not tied, whatever the defaults of its config say.
    text.tie_word_embeddings = tied and not any((text_name(n) or "").startswith(HEAD) for n in weight_names(folder))
    for name in OF_THE_WHOLE:
        if (value := getattr(whole, name, None)) is not None:
            setattr(text, name, value)
    return text


def text_name(name: str) -> str | None:
    """The name that a weight of several models in one has in a checkpoint of the text alone; None for others' weights.

    >>> [text_name(name) for name in ("model.language_model.norm.weight", "lm_head.weight", "model.visual.norm.weight")]
    ['model.norm.weight', 'lm_head.weight', None]
    """
    for beginning, alone in RENAMED.items():
        renamed, found = re.subn(beginning, alone, name)
        if found:
            return renamed
    return name if name.startswith(HEAD) else None


def from_folder(folder: str | Path, **settings: Any) -> Any:
    """The result of ``AutoModelForCausalLM.from_pretrained``, for the text part alone where there are several models.

    Other parts' weights are not read.
    """
    text = text_part(folder)
    if text is None:
        return AutoModelForCausalLM.from_pretrained(folder, **settings)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would report each weight of the other parts
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, config=text, key_mapping=RENAMED, **settings)
    finally:
        logging.set_verbosity(verbosity)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    del model._weight_conversions  # with which `save_pretrained` would give the weights the whole's names again
    return loaded


def _check_inside(whole: PreTrainedConfig, text: PreTrainedConfig) -> tuple[list[str], bool]:
    """The text model's class, if the whole computes text as that does, and whether the whole ties its head."""
    with torch.device("meta"):
        alone = AutoModelForCausalLM.from_config(text)
        try:
            model: Any = AutoModelForMultimodalLM.from_config(copy.deepcopy(whole))
        except Exception as error:  # the model's own code may fail in any way
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"transformers can't build it ({what})") from error
    layers = type(alone.base_model)
    if (count := sum(type(module) is layers for module in model.modules())) != 1:
        raise ValueError(f"{type(model).__name__} has {count} {layers.__name__}, not one")
    if (head := model.get_output_embeddings()) is None:
        raise ValueError(f"{type(model).__name__} has no head")
    if not torch.equal(measured_logits(model), measured_logits(alone)):
        raise ValueError(f"{type(model).__name__} and {type(alone).__name__} make different logits of hidden states")
    return [type(alone).__name__], head.weight is model.get_input_embeddings().weight
