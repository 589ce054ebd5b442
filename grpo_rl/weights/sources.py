"""The weights that are pushed: a model's own, with adapters merged into them, or adapters beside them.

Letters: r rank, E inputs and F outputs of a linear layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_rl.distributed.sharded_checkpoint import export_model
from grpo_rl.policies.lora import adapted_layers, base_weights, factors, saved_buffers


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    r"""All weights under the base checkpoint's names, made one at a time: $W + \frac{\alpha}{r} BA$ where W is adapted.

    Tied ones come once. The sum is made in fp32, and the model itself stays as it is. The engine rounds the sum to its
    dtype, in which small adapters may drown: what it samples from is then a little off what is trained.
    """
    layers = adapted_layers(model)
    for name, weight in base_weights(model):
        path, _, kind = name.rpartition(".")
        if kind == "weight" and path in layers:
            a, b = factors(layers[path])
            weight = torch.addmm(weight.to(a.dtype), b, a)
        yield name, weight


def adapter_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters as ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``, the latter scaled."""
    for path, layer in adapted_layers(model).items():
        for part, factor in zip("AB", factors(layer), strict=True):
            yield f"{path}.lora_{part}.weight", factor


def weights_to_send(model: torch.nn.Module, takes_adapters: bool, with_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names that the engine knows them by, made one at a time as they are asked for.

    Args:
        takes_adapters: the engine holds a base and adapters. Its base is the one that the trainer computes with, which
            differs from the model's folder if it is quantised.
        with_frozen: sends that base too, which never changes. An engine without adapters takes all weights every time.
    """
    if not takes_adapters:
        return merged_weights(model)
    return chain(base_weights(model) if with_frozen else (), adapter_weights(model))


def export_merged(model: PreTrainedModel, folder: Path) -> None:
    """Writes a model with adapters as one without, in its own dtype: it is read without peft or bitsandbytes."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    buffers = saved_buffers(model)
    weights = merged_weights(model)
    merged = {name: weight.cpu() if name in buffers else weight.to("cpu", model.dtype) for name, weight in weights}
    export_model(merged, config, folder, model.dtype, model.generation_config)
