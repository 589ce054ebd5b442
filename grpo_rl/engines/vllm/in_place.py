"""Weights written over those that vLLM's layers on a GPU compute with: a few kernels in the place of vLLM's loading."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from grpo_rl.engines.vllm.cpu import rows_of
from grpo_rl.engines.vllm.held import module_of, parts_in

HELD_BYTES = 1 << 29
"""Bytes of tensors that are held before they are written: some are temporary."""
DERIVED = ("MLA", "MoE", "Experts", "LoRA")
"""Words in the class names of layers that compute with something made from their weights, or hold them elsewhere."""


def is_plain(model: torch.nn.Module) -> bool:
    """True if every layer, on a GPU and whole, computes with the checkpoint's weights, or rows of them."""
    if torch.distributed.get_world_size() > 1 or next(model.parameters()).device.type != "cuda":
        return False
    for module in model.modules():
        if isinstance(module, MambaBase) or any(word in type(module).__name__ for word in DERIVED):
            return False
        method = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding):
            if not isinstance(method, UnquantizedEmbeddingMethod):
                return False
        elif isinstance(module, LinearBase) and not isinstance(method, UnquantizedLinearMethod):
            return False
    return True


def write_in_place(model: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes the weights where the model's layers hold them.

    Raises:
        LookupError: there is no place for a name.
        ValueError: a place has another shape.
    """
    places: list[Tensor] = []
    sources: list[Tensor] = []
    held = 0
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        module, _ = module_of(model, path)
        place = rows_of(module, getattr(module, kind), parts_in(model, path, module))
        if place.shape != tensor.shape:
            raise ValueError(f"{name}: vLLM holds {tuple(place.shape)}, and {tuple(tensor.shape)} came")
        places.append(place)
        sources.append(tensor)
        held += tensor.nbytes
        del tensor
        if held > HELD_BYTES:
            _copy(places, sources)
            places, sources, held = [], [], 0
    _copy(places, sources)


@torch.inference_mode()  # vLLM's weights may be inference tensors
def _copy(places: list[Tensor], sources: list[Tensor]) -> None:
    if places:
        torch._foreach_copy_(places, sources)
