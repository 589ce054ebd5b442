"""What vLLM could do on a CPU and does not choose by itself. Checked with vLLM 0.32."""

from __future__ import annotations

import functools
from typing import Any

from vllm import ir
from vllm.kernels import vllm_c

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
