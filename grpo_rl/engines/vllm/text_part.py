"""vLLM as the engine of the text part of several models in one: its class, its config, its weights. For vLLM 0.32."""

import copy
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from grpo_rl.policies.loading import text_name, text_part

LOAD_FORMAT = "grpo_rl_text_part"
"""The name under which vLLM finds :class:`TextPartLoader`."""


def text_part_arguments(model: str | Path) -> dict[str, Any]:
    """Further arguments of `vllm.LLM` for a folder of several models; none for a folder of one.

    Raises:
        ValueError: the text can't be taken out of them.
    """
    text = text_part(model)
    return {} if text is None else {"hf_overrides": _Replace(text), "load_format": LOAD_FORMAT}


class _Replace:
    """Gives vLLM the text part's config in the place of the whole's; it travels to vLLM's processes."""

    def __init__(self, text: PreTrainedConfig) -> None:
        self.text = text

    def __call__(self, config: PreTrainedConfig) -> PreTrainedConfig:
        # vLLM first asks with an empty config of the whole's type, to find out whether that is overridden.
        return copy.deepcopy(self.text) if config.get_text_config() is not config else config


@register_model_loader(LOAD_FORMAT)
class TextPartLoader(DefaultModelLoader):
    """Loads the text part's weights by the names that they have in a checkpoint of it alone."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, Tensor], None, None]:
        """The text part's weights; those of other parts are not read."""
        source = self.Source(
            model_config.model, model_config.revision, is_unused_weight=lambda name: text_name(name) is None
        )
        for name, tensor in self._get_weights_iterator(source):
            if renamed := text_name(name):
                yield renamed, tensor
