"""A model's norms and MLPs as fused kernels, by torch.compile; the products among them stay PyTorch's own."""

from __future__ import annotations

import os
import shutil

import torch
from transformers import PreTrainedModel

POINTWISE = ("RMSNorm", "MLP")
"""Endings of the class names of norms and MLPs in transformers.

Compiling whole layers around the attention was not faster than these alone (docs/log.md)."""
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
    if not can_compile(model.device):
        needed = "Triton" if model.device.type == "cuda" else "a C++ compiler (g++, or the one that CXX names)"
        raise ValueError(f"train_model.compile=true needs {needed}, which was not found; set it to null or false")
    torch.compiler.config.recompile_limit = max(RECOMPILE_LIMIT, torch.compiler.config.recompile_limit)
    for module in model.modules():
        if type(module).__name__.endswith(POINTWISE):
            module.compile(dynamic=True)
