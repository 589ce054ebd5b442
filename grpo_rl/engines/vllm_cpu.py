"""What vLLM could do on a CPU and does not choose by itself. Checked with vLLM 0.32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from vllm import ir
from vllm.kernels import vllm_c
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

PROVIDER = "grpo_rl_cpu"
NORMS = {"rms_norm": vllm_c.rms_no_var_size, "fused_add_rms_norm": vllm_c.rms_add_no_var_size}
"""Operation -> which arguments its kernel takes; the others are left to PyTorch."""


def cpu_settings() -> dict[str, Any]:
    """Further arguments of `vllm.LLM` on CPU; figures in docs/log.md."""
    _offer_norms()
    return {
        # The end of a prompt that does not fill a block is computed for each of the n answers. vLLM's block is 128.
        "block_size": 32,
        "ir_op_priority": {name: [PROVIDER] for name in NORMS},
    }


@functools.cache
def _offer_norms() -> None:
    """Registers vLLM's C++ norms for CPUs: it has compiled them, and offers them to GPUs alone."""
    for name, takes in NORMS.items():
        operation = getattr(ir.ops, name)
        kernel = operation.impls["vllm_c"]
        operation.register_impl(PROVIDER, supports_args=takes, inplace=kernel.inplace)(kernel.impl_fn)


def refresh_heads(model: torch.nn.Module) -> None:
    """Lets every head compute with the weight that it has now; to be called after weights were reloaded.

    On a CPU vLLM multiplies by a packed copy of a weight, which it packs anew when weights come under the layer's name.
    To a head that shares the embedding's weight they never do: it would go on with what it had at the start.
    """
    for head in packed_heads(model):
        cast(Any, head.quant_method).process_weights_after_loading(head)


def packed_heads(model: torch.nn.Module) -> Iterator[VocabParallelEmbedding]:
    """The heads that multiply by a packed copy of their weight; none on a GPU."""
    tables = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    # Some models, like Gemma 2, have no head of their own and multiply by the embedding.
    heads = [table for table in tables if isinstance(table, ParallelLMHead)] or tables
    return (head for head in heads if hasattr(head, "cpu_linear"))


def read_by_product(module: LinearBase | VocabParallelEmbedding, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight that the layer's product is made with, exactly, whatever form it is packed in.

    Every output of a one-hot input is one weight plus zeros.
    """
    return cast(Any, module).quant_method.apply(module, torch.eye(columns, dtype=dtype), None).T
