"""A model's norms and MLPs as fused kernels, by torch.compile; the products among them stay PyTorch's own."""

from __future__ import annotations

import os
import shutil

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies.packing import WINDOWS
from grpo_rl.policies.probe import Band, attention_calls
from grpo_rl.policies.supported import LAYOUT

POINTWISE = ("RMSNorm", "MLP")
"""How transformers ends the names of modules that are element-wise but for a mean over the last dimension and products.

Compiling whole layers around the attention was not faster than these alone (docs/log.md)."""
RECOMPILE_LIMIT = 64
"""How many kernels one class may have in a process; PyTorch's 8 would run the ninth uncompiled.

A class has one for each width of each model, with and without gradients, and one more where gradient checkpointing
computes again: there an uncompiled module keeps other tensors than the forward pass did, which fails."""


def can_compile(device: torch.device | str) -> bool:
    """Whether torch.compile finds what it needs: Triton on CUDA, a C++ compiler on CPU."""
    if torch.device(device).type == "cuda":
        from grpo_rl.policies import head_triton  # Triton takes long to import, and no CPU needs it

        return head_triton.available(device)
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_pointwise(model: PreTrainedModel) -> None:
    """Sets the model's norms and MLPs to compile at their first call, for any number of tokens.

    Raises:
        ValueError: there is no compiler.
    """
    _prepare(model)
    for module in model.modules():
        if type(module).__name__.endswith(POINTWISE):
            module.compile(dynamic=True)


def _prepare(model: PreTrainedModel) -> None:
    if not can_compile(model.device):
        needed = "Triton" if model.device.type == "cuda" else "a C++ compiler (g++, or the one that CXX names)"
        raise ValueError(f"train_model.compile=true needs {needed}, which was not found; set it to null or false")
    torch.compiler.config.recompile_limit = max(RECOMPILE_LIMIT, torch.compiler.config.recompile_limit)


def compile_layers(model: PreTrainedModel) -> None:
    """Sets each decoder layer to compile as one, attention included on CUDA, and the last norm by itself.

    Raises:
        ValueError: there is no compiler.
    """
    _prepare(model)
    if model.device.type == "cuda":
        torch._dynamo.config.specialize_float = True  # or a norm's epsilon is a tensor on the CPU, made by a C++ compiler
        setattr(model, WINDOWS, {
            call.window or (call.mask.window if isinstance(call.mask, Band) else None)
            for call in attention_calls(model, **{LAYOUT: None})
        })
    layers = {m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)}
    inside = {part for layer in layers for part in layer.modules()}
    for module in model.modules():
        if module in layers or (module not in inside and type(module).__name__.endswith(POINTWISE)):
            module.compile(dynamic=True)
