"""A model's layers, or its norms and MLPs alone, as fused kernels by torch.compile; products stay PyTorch's own."""

from __future__ import annotations

import os
import shutil
from typing import Literal

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies.attention import WINDOWS
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


def can_compile(device: torch.device | str) -> bool:
    """Tells whether torch.compile has its compiler: Triton on CUDA, a C++ compiler on CPU."""
    if torch.device(device).type == "cuda":
        from grpo_rl.policies import head_triton  # Triton takes long to import, and no CPU needs it

        return head_triton.available(device)
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_pointwise(model: PreTrainedModel) -> None:
    """Makes the model's norms and MLPs compile at their first call, for any number of tokens.

    Raises:
        ValueError: there is no compiler.
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
        ValueError: there is no compiler.
    """
    layers = {module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    if not layers or model._can_set_experts_implementation():
        compile_pointwise(model)
        return
    _prepare(model)
    if with_attention:
        # Otherwise a norm's epsilon becomes a tensor on the CPU, and building that takes a C++ compiler.
        torch._dynamo.config.specialize_float = True
        setattr(model, WINDOWS, layer_windows(model))
    inside = {part for layer in layers for part in layer.modules()}
    for module in model.modules():
        if module in layers or (module not in inside and type(module).__name__.endswith(POINTWISE)):
            module.compile(dynamic=True)


def _prepare(model: PreTrainedModel) -> None:
    if not can_compile(model.device):
        needed = "Triton" if model.device.type == "cuda" else "a C++ compiler (g++, or the one that CXX names)"
        raise ValueError(f"train_model.compile=true needs {needed}, which was not found; set it to null or false")
    torch.compiler.config.recompile_limit = max(RECOMPILE_LIMIT, torch.compiler.config.recompile_limit)
