"""A model's layers, or its norms and MLPs alone, as fused kernels by torch.compile; products stay PyTorch's own."""

from __future__ import annotations

from typing import Literal

import torch
import torch._inductor.config
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies.attention import WINDOWS
from grpo_rl.policies.compiler import keep_compiled_code, why_uncompiled
from grpo_rl.policies.supported import layer_windows

POINTWISE = ("RMSNorm", "MLP")
"""Endings of the class names of norms and MLPs in transformers.

On a CPU whole layers around the attention were not faster than these alone; on a GPU they are (docs/log.md)."""
Compile = bool | Literal["layers"]
"""Whether a model is compiled; ``layers``: each layer as one on a CPU too, otherwise norms and MLPs alone there."""
RECOMPILE_LIMIT = 64
"""Largest number of kernels of one class in a process; with PyTorch's 8 the ninth would run uncompiled.

A class has one for each width of each model, with and without gradients, and one more for the recomputation of gradient
checkpointing: an uncompiled module there would save other tensors than the forward pass did, which fails."""


def compile_model(model: PreTrainedModel, compile: Compile | None, device: torch.device, alone: bool) -> bool:
    """Has a model on this device compile at its first calls, if that is asked for, and tells whether it is.

    Args:
        compile: None: if a compiler works for the device.
        alone: no other process trains with this one; on CUDA whole layers are compiled then, not norms and MLPs alone.

    Raises:
        ValueError: it is asked for, and there is no compiler, or it fails.
    """
    keep_compiled_code()
    if compile is False or (compile is None and why_uncompiled(device)):
        return False
    on_one_gpu = alone and device.type == "cuda"
    if on_one_gpu or compile == "layers":
        compile_layers(model, with_attention=on_one_gpu)
    else:
        compile_pointwise(model)
    return True


def compile_pointwise(model: PreTrainedModel) -> None:
    """Makes the model's norms and MLPs compile at their first call, for any number of tokens.

    Raises:
        ValueError: there is no compiler, or it fails.
    """
    _prepare(model)
    for module in model.modules():
        if type(module).__name__.endswith(POINTWISE):
            module.compile(dynamic=True)


def compile_layers(model: PreTrainedModel, with_attention: bool) -> None:
    """Makes each decoder layer compile as one, for any number of tokens.

    Layers of a mixture of experts choose what they compute: there, norms and MLPs alone are compiled.

    Args:
        with_attention: attention is part of the graph, as FlexAttention, which has gradients on CUDA only; otherwise
            the graph is two, before and after it.

    Raises:
        ValueError: there is no compiler, or it fails.
    """
    layers = {module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    if not layers or model._can_set_experts_implementation():
        compile_pointwise(model)
        return
    _prepare(model)
    if with_attention:
        setattr(model, WINDOWS, layer_windows(model))
    inside = {part for layer in layers for part in layer.modules()}
    for module in model.modules():
        if module in layers or (module not in inside and type(module).__name__.endswith(POINTWISE)):
            module.compile(dynamic=True)


def _prepare(model: PreTrainedModel) -> None:
    if why := why_uncompiled(model.device):
        raise ValueError(f"train_model.compile=true can't be had: {why}; set it to null or false")
    # Otherwise a norm's epsilon becomes a graph's input, a tensor on the CPU. On a GPU that takes a C++ compiler too.
    torch._dynamo.config.specialize_float = True
    # Otherwise a norm has one of two backward kernels on a GPU, by its number of rows, each compiled when it comes.
    torch._inductor.config.triton.mix_order_reduction_non_strict_mode = True
    torch.compiler.config.recompile_limit = max(RECOMPILE_LIMIT, torch.compiler.config.recompile_limit)
