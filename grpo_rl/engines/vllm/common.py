"""The base of vLLM's engines: settings, the arguments of vLLM that follow from them, and an executor."""

import functools
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import grpo_rl.engines.vllm.environment  # noqa: F401, what vLLM reads at import

# isort: split
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from grpo_rl.engines.base import Sampling
from grpo_rl.engines.sampling import batch_tokens
from grpo_rl.engines.vllm.cpu import cpu_arguments, has_states
from grpo_rl.engines.vllm.drafts import draft_arguments
from grpo_rl.engines.vllm.lora import adapter_arguments
from grpo_rl.engines.vllm.sampling import sampling_params
from grpo_rl.engines.vllm.text_part import text_part_arguments
from grpo_rl.engines.vllm.worker import WorkerExtension
from grpo_rl.policies.generation import end_ids
from grpo_rl.policies.loading import model_config


class VLLMBase:
    """Base of vLLM's engines.

    A group's responses are requests of their own that arrive together: with the prefix cache the first one computes the
    full blocks of their prompt, and prompts are computed in parts alongside responses under way.

    Args:
        model: a local model folder; of several models in one, the text part is loaded.
        max_model_len: longest prompt and response together, in tokens.
        tensor_parallel_size: GPUs that share one copy of the model.
        gpu_memory_utilization: part of a GPU's memory that vLLM may take, weights and KV cache.
        enforce_eager: None: CUDA graphs on a GPU, none on a CPU; True: no graphs; False: compiled too, a slow start.
        max_num_seqs: responses sampled at the same time.
        adapter_rank: more than 0: the engine holds a LoRA adapter of this rank next to its weights.
        adapter_targets: last names of the layers that it adapts, as the checkpoint has them.
        cache_bytes: of the KV cache on a GPU; None: what vLLM finds to be left of its share. It finds that only while
            no other process takes or frees memory there.
        can_sleep: on a GPU, weights and KV cache lie in memory that a sleeping engine gives back. vLLM has such memory
            for one engine of a process at a time.
        router_replay: records the experts that a mixture's routers choose for each token.
        speculative: drafts of up to ``draft_tokens`` tokens; see ``inference_model.speculative``.
        sampling: what it is started for: kept sets on a GPU and stop strings have to be enabled here.

    Raises:
        ValueError: vLLM refuses the model or the settings, or has no kernels for adapters in this dtype.
    """

    def __init__(
        self,
        model: str | Path,
        max_model_len: int,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        enforce_eager: bool | None = None,
        dtype: str = "bfloat16",
        max_num_seqs: int = 256,
        adapter_rank: int = 0,
        adapter_targets: Sequence[str] = (),
        cache_bytes: int | None = None,
        can_sleep: bool = False,
        router_replay: bool = False,
        speculative: str | None = None,
        draft_tokens: int = 4,
        sampling: Sampling = Sampling(),  # noqa: B008, frozen
    ) -> None:
        if router_replay and torch.cuda.is_available():
            raise ValueError("policy.router_replay=true was never tried with vLLM on a GPU; set it to false")
        self._records_routes = router_replay
        self.version, self.max_model_len, self.dtype = 0, max_model_len, getattr(torch, dtype)
        self.takes_adapters = adapter_rank > 0
        self._adapter: LoRARequest | None = None
        self._started_for, self._model = sampling, model
        self._can_free = torch.cuda.is_available()
        self._can_sleep = can_sleep and self._can_free
        self._is_one_worker = tensor_parallel_size == 1
        self.proves_bytes = self._is_one_worker and not self._can_free
        self._arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": not sampling.stop,  # ids in, ids out
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "tensor_parallel_size": tensor_parallel_size,
            "distributed_executor_backend": "uni" if self._is_one_worker else "mp",
            # Log-probabilities after temperature and cuts: those of the distribution that was sampled from.
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enforce_eager": not self._can_free if enforce_eager is None else enforce_eager,
            "max_num_seqs": max_num_seqs,
            "disable_log_stats": True,
            "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
            **text_part_arguments(model),
        }
        if self._can_free:
            tokens = batch_tokens(torch.cuda.get_device_properties(0).total_memory)
            self._arguments |= {
                "gpu_memory_utilization": gpu_memory_utilization,
                "enable_sleep_mode": can_sleep,
                "max_num_batched_tokens": max(max_num_seqs, min(tokens, max_num_seqs * max_model_len)),
                "enable_chunked_prefill": True,
                "kv_cache_memory_bytes": cache_bytes,
                "return_sampling_mask": sampling.cuts,
            }
            if enforce_eager is None:  # mode 0: no compilation
                self._arguments["compilation_config"] = {
                    "mode": 0,
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": graph_sizes(max_num_seqs),
                }
        else:
            self._arguments |= cpu_arguments(model, self.dtype, max_model_len, max_num_seqs, tensor_parallel_size)
        self._has_drafts = speculative is not None
        if speculative is not None:
            if self._can_free or not self._is_one_worker or has_states(model):
                raise ValueError("inference_model.speculative is for CPUs, one worker, attention alone; set it to null")
            self._arguments |= draft_arguments(speculative, draft_tokens)
        if adapter_rank:
            self._arguments |= adapter_arguments(adapter_rank, adapter_targets, self.dtype, self._can_free)

    @functools.cached_property
    def _end_ids(self) -> tuple[int, ...]:
        return end_ids(self._model)

    @functools.cached_property
    def _vocabulary(self) -> int:
        return model_config(self._model).get_text_config().vocab_size

    def _parameters(self, n: int, sampling: Sampling, routes_key: str | None) -> SamplingParams:
        """vLLM's parameters of a request, whose routes will be asked for under ``routes_key``, if there is one."""
        if sampling.stop and not self._started_for.stop:
            raise ValueError("this engine has no tokenizer; start it with a sampling that has stop strings")
        returns_kept = self._arguments.get("return_sampling_mask", False)
        if sampling.cuts and self._can_free and not returns_kept:
            raise ValueError("this engine returns no kept sets; start it with a sampling that cuts tokens off")
        return sampling_params(n, sampling, self._end_ids, returns_kept, routes_key)


class NamelessExecutor(UniProcExecutor):
    """Runs one worker in a process that leaves nothing in /dev/shm, however it ends.

    Named semaphores would stay there when the engine is killed together with vLLM's resource tracker.
    """

    def _init_executor(self) -> None:
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("fork", force=True)  # whose semaphores have no names; nothing is started by it
        try:
            super()._init_executor()
        finally:
            multiprocessing.set_start_method(before, force=True)


def graph_sizes(most_sequences: int) -> list[int]:
    """Numbers of responses for which vLLM captures a CUDA graph of decoding; others are padded to the next one.

    They are vLLM's own up to 512, where it stops, and go on up to the engine's largest number.

    >>> sizes = graph_sizes(1000)
    >>> len(sizes), sizes[:5], sizes[-3:]
    (82, [1, 2, 4, 8, 16], [976, 992, 1000])
    >>> graph_sizes(3)
    [1, 2, 3]
    """
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, most_sequences, 16)]
    return [size for size in steps if size < most_sequences] + [most_sequences]
