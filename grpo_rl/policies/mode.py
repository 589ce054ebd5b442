"""The mode that a policy's model computes in: deterministic, with gradient checkpointing where it is switched on."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_rl.policies.lora import adapted_layers


def switch_off_noise(model: PreTrainedModel) -> PreTrainedModel:
    """The model in evaluation mode, which it is trained in too: its layers drop nothing and add no noise.

    The sampler computes without noise, so with it the ratio of fresh weights would not be 1. Two things stay in
    training mode, both asked for by name: the dropout of adapters, and layers whose checkpointing was enabled before.
    """
    model.eval()
    for layer in adapted_layers(model).values():
        layer.lora_dropout.train()
    for module in model.modules():
        # On a CPU bitsandbytes packs a 4-bit weight anew when it is first read in evaluation mode, rounding its scales.
        if type(module).__module__.startswith("bitsandbytes."):
            module.train()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True  # its own flag alone: transformers asks it whether to recompute
            module._gradient_checkpointing_func = _recomputed_without_noise(module)
    return model


def _recomputed_without_noise(layer: GradientCheckpointingLayer) -> Callable[..., Tensor]:
    """transformers' checkpointing, but what runs inside finds the layer in evaluation mode."""

    def recomputed(call: Callable[..., Tensor], *args: object) -> Tensor:
        def quietly(*args: object) -> Tensor:
            layer.training = False
            try:
                return call(*args)
            finally:
                layer.training = True

        return checkpoint(quietly, *args, use_reentrant=False)

    return recomputed
