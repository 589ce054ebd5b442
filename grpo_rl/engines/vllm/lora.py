"""A LoRA adapter in vLLM's memory: put there without a file, and read back as it is computed with. For vLLM 0.32.

vLLM multiplies by an adapter's two factors next to each layer's own weight, on CPU by PyTorch, on GPU by kernels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear

from grpo_rl.engines.fingerprint import fingerprint

RANKS: tuple[int, ...] = get_args(MaxLoRARanks)
"""Ranks of vLLM's adapter slots; what an adapter leaves of its slot is zero."""
_ID = 1


def adapter_arguments(rank: int, targets: Sequence[str], dtype: torch.dtype, on_gpu: bool) -> dict[str, Any]:
    """Further arguments of `vllm.LLM`: one slot for one adapter of these layers.

    Raises:
        ValueError: the GPU's kernels for adapters don't take the dtype.
    """
    if on_gpu and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"train_model.lora.push=adapter with {dtype}: on a GPU vLLM multiplies by adapters in bfloat16 or float16 "
            "alone; set train_model.dtype=bfloat16 or train_model.lora.push=merged"
        )
    slot = min((size for size in RANKS if size >= rank), default=rank)  # vLLM refuses a larger one
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": slot, "lora_target_modules": list(targets)}


def adapter_request(version: int) -> LoRARequest:
    """The part of a request that asks vLLM to apply the adapter.

    The prefix cache keeps keys and values by its name, so those of an earlier adapter are never found under it.
    """
    name = f"policy-{version}"
    # Without an adapter in memory vLLM would read one from this path, where there is nothing, and fail.
    return LoRARequest(name, _ID, f"/in-memory/{name}")


def hold_adapter(model_runner: Any, factors: Mapping[str, Tensor]) -> None:
    """Puts the adapter, ``<layer>.lora_A.weight`` and scaled ``<layer>.lora_B.weight``, in place of the last one."""
    manager = model_runner.lora_manager._adapter_manager
    rank = next(len(factor) for name, factor in factors.items() if ".lora_A." in name)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        _ID,
        dict(factors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # scaled by 1
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper else None,
    )
    manager.remove_adapter(_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(_ID)


def held_factor_fingerprint(model_runner: Any, module: torch.nn.Module, part: str, index: int) -> int:
    """This worker's share of a factor's fingerprint, 0 where another counts it; ``index`` is a fused layer's part.

    Raises:
        LookupError: the layer holds no adapter.
    """
    slots = model_runner.lora_manager._adapter_manager.lora_index_to_id
    if not isinstance(module, BaseLayerWithLoRA) or _ID not in slots:
        raise LookupError(f"vLLM holds no adapter in {type(module).__name__}")
    base, rank = without_adapter(module), getattr(module, "tp_rank", 0)
    assert isinstance(base, LinearBase)
    # The slot's unused rows and columns are zeros, which add nothing.
    factor = getattr(module, f"lora_{part.lower()}_stacked")[index][slots.index(_ID), 0]
    if isinstance(base, RowParallelLinear) and part == "A":
        return fingerprint(factor, column_start=rank * factor.shape[1])
    if isinstance(base, RowParallelLinear) or part == "A" or not hasattr(base, "output_partition_sizes"):
        return fingerprint(factor) if rank == 0 else 0
    if isinstance(base, QKVParallelLinear) and index > 0:
        # With fewer key-value heads than workers, several workers hold the same head; the first one counts it.
        rank, copy = divmod(rank, base.num_kv_head_replicas)
        if copy:
            return 0
    return fingerprint(factor, row_start=rank * factor.shape[0])


def without_adapter(module: torch.nn.Module) -> torch.nn.Module:
    """The layer itself, also where vLLM has wrapped it for adapters."""
    return module.base_layer if isinstance(module, BaseLayerWithLoRA) else module
