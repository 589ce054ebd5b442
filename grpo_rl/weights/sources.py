"""Sources of the weights that are pushed: a model's own, adapters merged into them, or adapters beside them.

Letters: r rank, E inputs and F outputs of a linear layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_rl.policies.lora import adapted_layers, base_weights, factors, has_adapters


class WeightSource(Protocol):
    """Tensors under the names that the engine knows them by, made one at a time as they are asked for."""

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that never change, which are sent once."""
        ...

    def moving(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that training changes, which are sent with every push."""
        ...


class WholeModel:
    """All parameters of a model; tied ones are sent once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Empty: all parameters may move."""
        return iter(())

    def moving(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters."""
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())


class MergedAdapters:
    r"""The weights $W + \frac{\alpha}{r} BA$ of a model with adapters, which itself stays as it is.

    The sum is made in fp32; the engine rounds it to its dtype, in which small adapters may drown: what it samples from
    is then a little off what is trained.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._layers = model, adapted_layers(model)

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Empty: an engine takes all of a model's weights at once."""
        return iter(())

    def moving(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, under the base checkpoint's names."""
        for name, weight in base_weights(self._model):
            path, _, kind = name.rpartition(".")
            if kind == "weight" and path in self._layers:
                a, b = factors(self._layers[path])
                weight = torch.addmm(weight.to(a.dtype), b, a)
            yield name, weight


class AdaptersBeside:
    """A model's base, and adapters as ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``, the latter scaled."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._layers = model, adapted_layers(model)

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """The base: what the trainer computes with, which after quantisation is not what the model's folder holds."""
        return base_weights(self._model)

    def moving(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters."""
        for path, layer in self._layers.items():
            for part, factor in zip("AB", factors(layer), strict=True):
                yield f"{path}.lora_{part}.weight", factor


def export_merged(model: PreTrainedModel, folder: Path) -> None:
    """Writes a model with adapters as one without, in its own dtype: it is read without peft or bitsandbytes."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.generation_config = model.generation_config
    merged = {name: weight.to("cpu", model.dtype) for name, weight in MergedAdapters(model).moving()}
    plain.save_pretrained(folder, state_dict=merged)


def source_of(model: torch.nn.Module, takes_adapters: bool) -> WeightSource:
    """The source of the weights that an engine is to be sent.

    Raises:
        ValueError: the engine takes adapters, and the model has none.
    """
    if not has_adapters(model):
        if takes_adapters:
            raise ValueError("the engine was made for adapters, and the model has none; make it without adapter_rank")
        return WholeModel(model)
    return AdaptersBeside(model) if takes_adapters else MergedAdapters(model)
