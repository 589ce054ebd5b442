"""Arguments of vLLM's engines: settings of ours and of the device, in vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_rl.engines.capacity import batch_tokens
from grpo_rl.engines.vllm.cpu import cpu_arguments
from grpo_rl.engines.vllm.lora import adapter_arguments


def engine_arguments(
    model: str | Path,
    max_model_len: int,
    seed: int,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    enforce_eager: bool | None,
    dtype: torch.dtype,
    max_num_seqs: int,
    adapter_rank: int,
    adapter_targets: Sequence[str],
    cache_bytes: int | None = None,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` and `AsyncEngineArgs`; ours are those of `grpo_rl.engines.vllm.engine.VLLMEngine`.

    A group's responses are requests of their own that arrive together: with the prefix cache the first one computes the
    full blocks of their prompt, and prompts are computed in parts beside responses under way.

    Args:
        cache_bytes: of the KV cache on a GPU; None: what vLLM finds to be left of its share.

    Raises:
        ValueError: vLLM has no kernels for adapters in this dtype.
    """
    on_gpu = torch.cuda.is_available()
    gpu_arguments: dict[str, Any] = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True}
    if on_gpu:
        tokens = batch_tokens(torch.cuda.get_device_properties(0).total_memory)
        gpu_arguments["max_num_batched_tokens"] = max(max_num_seqs, min(tokens, max_num_seqs * max_model_len))
        gpu_arguments["enable_chunked_prefill"] = True
        gpu_arguments["kv_cache_memory_bytes"] = cache_bytes
    if enforce_eager is None:
        gpu_arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # 0: no compilation
    return {
        "model": str(model),
        "skip_tokenizer_init": True,  # ids in, ids out
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_model_len,
        "seed": seed,
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": "mp" if tensor_parallel_size > 1 else "uni",
        # Log-probabilities after temperature and top-p: those of the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enforce_eager": not on_gpu if enforce_eager is None else enforce_eager,
        "max_num_seqs": max_num_seqs,
        "disable_log_stats": True,
        **(gpu_arguments if on_gpu else cpu_arguments(model, dtype, max_model_len, max_num_seqs, tensor_parallel_size)),
        **(adapter_arguments(adapter_rank, adapter_targets, dtype, on_gpu) if adapter_rank else {}),
    }
