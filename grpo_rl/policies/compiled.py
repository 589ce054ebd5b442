"""A model's layers, or its norms and MLPs alone, as fused kernels by torch.compile; products stay PyTorch's own."""

from __future__ import annotations

import torch
import torch._inductor.config
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies.attention import MASK_CHUNK, TEMPERATURE, WINDOWS
from grpo_rl.policies.attention_flex import check_head_size
from grpo_rl.policies.compiler import keep_compiled_code, why_uncompiled
from grpo_rl.policies.mixers import mixers
from grpo_rl.policies.supported import supported_calls

POINTWISE = ("RMSNorm", "MLP")
"""Endings of the class names of norms and MLPs in transformers.

On a CPU whole layers around the attention were not faster than these alone; on a GPU they are (docs/log.md)."""
RECOMPILE_LIMIT = 64
"""Largest number of kernels of one class in a process; with PyTorch's 8 the ninth would run uncompiled, or fail.

A class has one for each width of each model, with and without gradients, and one more for the recomputation of gradient
checkpointing: an uncompiled module there would save other tensors than the forward pass did, which fails."""


def compile_model(model: PreTrainedModel, compile: bool | None, device: torch.device, alone: bool) -> bool:
    """Has a model on this device compile at its first calls, if requested; returns whether it does.

    Args:
        compile: None: if a compiler works for the device.
        alone: no other process trains with this one; on CUDA whole layers are compiled then, not norms and MLPs alone.

    Raises:
        ValueError: compilation is requested, and there is no compiler, or it fails.
    """
    if compile is False:
        return False
    keep_compiled_code()  # before the small compilation, which is the first
    if compile is None and why_uncompiled(device):
        return False
    if alone and device.type == "cuda":
        compile_layers(model)
    else:
        compile_pointwise(model)
    return True


def compile_pointwise(model: PreTrainedModel) -> None:
    """Makes the model's norms and MLPs compile at their first call, for any number of tokens."""
    _prepare(model)
    for module in model.modules():
        if type(module).__name__.endswith(POINTWISE):
            module.compile(dynamic=True)


def compile_layers(model: PreTrainedModel) -> None:
    """Makes each decoder layer compile as one, for any number of tokens, with FlexAttention inside.

    That has gradients on CUDA only. A layer that does not become one graph, or is compiled too often, is an error at
    its call: PyTorch would silently compute all T * T scores. Layers of a mixture of experts choose what they compute,
    those that carry a state compute node by node, and chunks and temperatures go by positions: there, norms and MLPs
    alone are compiled.
    """
    layers = {module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    by_position = any(hasattr(module, name) for module in model.modules() for name in (MASK_CHUNK, TEMPERATURE))
    if not layers or by_position or model._can_set_experts_implementation() or any(mixers(model)):
        compile_pointwise(model)
        return
    calls = supported_calls(model)
    for call in calls:
        check_head_size(call.head_size, model.device)
    setattr(model, WINDOWS, {call.any_window for call in calls})
    _prepare(model)
    inside = {part for layer in layers for part in layer.modules()}
    for module in model.modules():
        if module in layers:
            # Layers of a class share their kernels; with `isolate_recompiles` each would be compiled by itself.
            module.compile(dynamic=True, fullgraph=True)
        elif module not in inside and type(module).__name__.endswith(POINTWISE):
            module.compile(dynamic=True)


def _prepare(model: PreTrainedModel) -> None:
    if why := why_uncompiled(model.device):
        raise ValueError(f"train_model.compile=true can't be had: {why}; set it to null or false")
    torch.compiler.config.recompile_limit = max(RECOMPILE_LIMIT, torch.compiler.config.recompile_limit)
    if model.device.type != "cuda":
        return
    # vLLM's start sets one, and compiled functions check the number. With a GPU the host computes on small tensors
    # only: a step of 512 tokens took 82 to 102 ms with 16 threads and 76 with one (docs/log.md).
    torch.set_num_threads(1)
    # Otherwise a norm's epsilon becomes a graph's input, a tensor on the CPU, which takes a C++ compiler too.
    torch._dynamo.config.specialize_float = True
    # Otherwise a norm has one of two backward kernels, by its number of rows, each compiled when it comes.
    torch._inductor.config.triton.mix_order_reduction_non_strict_mode = True
