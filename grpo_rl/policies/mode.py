"""Deterministic mode of a policy's model: no dropout or noise, also under gradient checkpointing."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies.lora import adapted_layers


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
    """Checks that the model's mode has not changed since :func:`switch_off_noise`.

    Raises:
        ValueError: the model was put into training mode, or its gradient checkpointing was switched on or off.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (model, model.base_model, *layers):
        recomputes = isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
        quiet = getattr(module, "_gradient_checkpointing_func", None) is _recomputed_without_noise
        if module.training != recomputes or (recomputes and not quiet):
            raise ValueError(
                f"{type(module).__name__} was put into training mode, in which models drop activations and add noise, "
                "or its gradient checkpointing was switched on or off; TrainPolicy trains in evaluation mode, with "
                "gradient checkpointing that was enabled before: leave out the call of train(), or enable or disable "
                "checkpointing first and make the TrainPolicy after it"
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
