"""Shared-prefix attention: each token attends to its own node of a tree of prefixes, and to the nodes before that.

Registered with transformers under :data:`ATTENTION_NAME`; FlexAttention on CUDA, batched products on CPU. Layers around
it, or their norms and MLPs alone, become fused kernels by torch.compile; products stay PyTorch's own.
Letters: T tokens of the micro-batch, M response tokens that differ, H query heads, K key-value heads, D head size of
queries and keys, E that of values.
"""

import functools
from typing import Any, no_type_check

import torch
import torch._inductor.config
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_rl.policies.attention_cpu import Rules, TwoPartAttention
from grpo_rl.policies.attention_flex import (
    PaddedLayout,
    check_head_size,
    flex_in_layer,
    flex_shared_prefix,
    whole_blocks,
)
from grpo_rl.policies.compiler import keep_compiled_code, why_uncompiled
from grpo_rl.policies.lora import adapted_layers
from grpo_rl.policies.mixers import mixers, share_prompts
from grpo_rl.policies.packing import LAYOUT, Layout, Packed
from grpo_rl.policies.probe import Chunks, trunk
from grpo_rl.policies.routing import record_routers, replay_routes
from grpo_rl.policies.supported import masks_to_apply, not_understood, supported_calls

ATTENTION_NAME = "grpo_rl_shared_prefix"
"""The name under which transformers models find :func:`dispatch` (``config._attn_implementation``)."""
MASK_WINDOW = "grpo_rl_mask_window"
"""Attribute of an attention module whose sliding window transformers puts into the mask and passes in no other way."""

MASK_CHUNK = "grpo_rl_mask_chunk"
"""Attribute of an attention module whose chunks transformers puts into the mask: a token sees those of its own."""
TEMPERATURE = "grpo_rl_temperature"
"""Attribute of an attention module that scales its queries by their positions: f and a of :func:`query_scale`."""
WINDOWS = "grpo_rl_windows"
"""Attribute of a model whose layers are compiled on CUDA: sliding windows of its layers, None for full attention."""
POINTWISE = ("RMSNorm", "MLP")
"""Endings of the class names of norms and MLPs in transformers.

On a CPU whole layers around the attention were not faster than these alone; on a GPU they are (docs/log.md)."""
RECOMPILE_LIMIT = 64
"""Largest number of kernels of one class in a process; with PyTorch's 8 the ninth would run uncompiled, or fail.

A class has one for each width of each model, with and without gradients, and one more for the recomputation of gradient
checkpointing: an uncompiled module there would save other tensors than the forward pass did, which fails."""


def use_shared_prefix(model: PreTrainedModel, router_replay: bool = False) -> PreTrainedModel:
    """The model with its attention switched to shared prefixes, and its noise off (`switch_off_noise`).

    Args:
        router_replay: its routers take the experts that a micro-batch gives (`grpo_rl.policies.routing`).

    Raises:
        ValueError: the model would be scored wrongly, keeps an attention of its own, or its routers can't replay.
    """
    if router_replay:
        replay_routes(model)
    record_routers(model)
    masks = masks_to_apply(model)
    model.set_attn_implementation(ATTENTION_NAME)
    assert model.config._attn_implementation == ATTENTION_NAME, model.config._attn_implementation
    for name, mask in masks.items():
        attribute, size = (MASK_CHUNK, mask.size) if isinstance(mask, Chunks) else (MASK_WINDOW, mask.window)
        setattr(model.get_submodule(name), attribute, size)
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            # Its own scales go by the places of tokens, which are not their positions here.
            module.attn_temperature_tuning = False
            setattr(module, TEMPERATURE, (module.floor_scale, module.attn_scale))
    share_prompts(model)
    return switch_off_noise(model)


def forward_hidden(model: PreTrainedModel, packed: Packed) -> Float[Tensor, "M E"]:
    """Hidden states (after the final norm) that predict the response tokens, those that differ once.

    Raises:
        ValueError: the model's attention was not set by :func:`use_shared_prefix`, or its mode was changed since.
    """
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ValueError("call use_shared_prefix(model) first: its attention does not know shared prefixes")
    check_no_noise(model)
    ids, positions, layout = packed.input_ids, packed.position_ids, packed.layout
    if windows := getattr(model, WINDOWS, None):
        tokens = whole_blocks(len(ids))
        ids, positions = (pad(x, (0, tokens - len(x))) for x in (ids, positions))
        layout = PaddedLayout.of(layout, tokens, windows, ids.device)
    out = trunk(model)(input_ids=ids[None], position_ids=positions[None], use_cache=False, **{LAYOUT: layout})
    return out.last_hidden_state[0][packed.predict_index]


@no_type_check  # traced: the tests' run-time type checks can't be
def dispatch(module, query, key, value, attention_mask, **keywords):
    """The attention that transformers calls; in a layer that is compiled on CUDA it is part of the layer's graph."""
    layout = keywords[LAYOUT]
    if not isinstance(layout, PaddedLayout):
        return attention(module, query, key, value, attention_mask, **keywords)
    assert attention_mask is None  # `compile_layers` has checked what else a layer could ask for
    window = keywords.get("sliding_window") or getattr(module, MASK_WINDOW, None)
    scale = keywords.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = flex_in_layer(query, key, value, layout, scale, window, keywords.get("softcap"), keywords.get("s_aux"))
    return out.transpose(1, 2), None


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 K T D"],
    value: Float[Tensor, "1 K T E"],
    attention_mask: object,
    *,
    prefix_layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    **keywords: object,
) -> tuple[Float[Tensor, "1 T H E"], None]:
    """Attention of a flat micro-batch, a tree of prefixes, with the signature of transformers' attention functions.

    Args:
        s_aux: attention sinks: one extra logit a head in the softmax, with a value of zero; transformers' name.
    """
    unknown = dropout or not_understood(keywords) or attention_mask is not None
    assert not unknown, f"{type(module).__name__} asks for what `masks_to_apply` should have refused"
    sliding_window = sliding_window or getattr(module, MASK_WINDOW, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if temperature := getattr(module, TEMPERATURE, None):
        scales = query_scale(prefix_layout.positions.to(query.device), *temperature)
        query = (query * scales[:, None]).to(query.dtype)
    if chunk := getattr(module, MASK_CHUNK, None):
        order, prefix_layout = prefix_layout.in_chunks(chunk)
        order = order.to(query.device)
        query, key, value = (x.index_select(2, order) for x in (query, key, value))
    if query.device.type == "cuda":
        out = flex_shared_prefix(query, key, value, prefix_layout, scale, sliding_window, softcap, s_aux)
        out = out.transpose(1, 2)
    else:
        # [1, heads, T, D] in shape, but laid out by token: this way nothing is copied.
        by_token = (x[0].transpose(0, 1) for x in (query, key, value))
        out = TwoPartAttention.apply(*by_token, s_aux, prefix_layout, Rules(scale, sliding_window, softcap))[None]
    return (out.index_select(1, order.argsort()) if chunk else out), None  # pyrefly: ignore[unbound-name]


def query_scale(positions: Int[Tensor, " T"], floor: int | float, scale: int | float) -> Float[Tensor, " T"]:
    r"""Factors on queries at these positions p: $1 + a \log(1 + \lfloor (p + 1) / f \rfloor)$.

    Source: Llama 4's attention temperature in transformers; https://arxiv.org/abs/2501.19399.

    >>> query_scale(torch.tensor([0, 6, 7]), floor=8, scale=1.0)
    tensor([1.0000, 1.0000, 1.6931])
    """
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, dispatch)


def switch_off_noise(model: PreTrainedModel) -> PreTrainedModel:
    """The model in evaluation mode, in which it is also trained: without dropout or noise.

    The sampler computes without noise, so with noise the ratio of fresh weights would not be 1. Two things stay in
    training mode: the dropout of adapters, and layers whose checkpointing was enabled before.
    """
    model.eval()
    for layer in adapted_layers(model).values():
        layer.lora_dropout.train()
    for module in model.modules():
        # On a CPU bitsandbytes packs a 4-bit weight anew when it is first read in evaluation mode, rounding its scales.
        if type(module).__module__.startswith("bitsandbytes."):
            module.train()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True  # not its children's: transformers reads it to decide whether to recompute
            module._gradient_checkpointing_func = _recomputed_without_noise
    return model


def check_no_noise(model: PreTrainedModel) -> None:
    """Raises ValueError where the model's mode has changed since :func:`switch_off_noise`."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (model, model.base_model, *layers):
        recomputes = isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
        quiet = getattr(module, "_gradient_checkpointing_func", None) is _recomputed_without_noise
        if module.training != recomputes or (recomputes and not quiet):
            raise ValueError(
                f"{type(module).__name__} was put into training mode, or its checkpointing was switched on or off: "
                "leave out the call of train(), and make the TrainPolicy after checkpointing is enabled or disabled"
            )


def _recomputed_without_noise(call: functools.partial[Any], *args: object) -> Any:
    """transformers' checkpointing, with the layer in evaluation mode during its forward pass.

    The layer is taken from the call, as copies of a model share this function.
    """
    layer = call.func.__self__  # pyrefly: ignore[missing-attribute]

    def quietly(*args: object) -> Any:
        layer.training = False
        try:
            return call(*args)
        finally:
            layer.training = True

    return checkpoint(quietly, *args, use_reentrant=False)


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
