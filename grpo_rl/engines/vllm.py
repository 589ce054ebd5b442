"""vLLM as an engine, in the training process: the production engine on GPU and on CPU.

The only file, with vllm_cpu.py, that imports vllm. Checked with vLLM 0.32.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from grpo_rl.engines.base import Samples, Sampling, check_request
from grpo_rl.fingerprint import add, fingerprint

# Read by vLLM at import. In-process: a second process would take half a minute to start and copy every weight twice.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])

# vLLM's own use of torch, nothing a user could change.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")

from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.sampling_params import RequestOutputKind

from grpo_rl.engines.vllm_cpu import cpu_settings


class VLLMEngine:
    """One vLLM instance with the prefix cache on: the full blocks of a group's prompt are computed once.

    Args:
        model: a local model folder.
        max_model_len: prompt and answer, in tokens.
        seed: of vLLM's sampler.
        tensor_parallel_size: GPUs that share one copy of the model.
        gpu_memory_utilization: part of a GPU's memory that vLLM may take, weights and KV cache.
        enforce_eager: False compiles at start; generation gets faster, starting slower.
        dtype: of the weights and the computation.
        max_num_seqs: answers computed at the same time.

    Raises:
        ValueError: vLLM refuses the model or the settings.
    """

    def __init__(
        self,
        model: str | Path,
        max_model_len: int,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        enforce_eager: bool = True,
        dtype: str = "bfloat16",
        max_num_seqs: int = 256,
    ) -> None:
        self.version = 0
        self.max_model_len = max_model_len
        self._asleep = False
        self.dtype = getattr(torch, dtype)
        on_gpu = torch.cuda.is_available()
        gpu_settings = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True}
        self._llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,  # ids in, ids out
            dtype=dtype,
            max_model_len=max_model_len,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            distributed_executor_backend="mp" if tensor_parallel_size > 1 else "uni",
            # Log-probabilities after temperature and top-p: those of the distribution that was sampled from.
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            enforce_eager=enforce_eager,
            max_num_seqs=max_num_seqs,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            worker_extension_cls=f"{__name__}.{WeightReceiver.__name__}",
            **(gpu_settings if on_gpu else cpu_settings()),
        )
        # vLLM freezes the garbage collector's view of what exists, to spare an engine's own process work. Here that
        # takes in the trainer, whose cycles would never be freed: a sweep would keep every job's model.
        gc.unfreeze()
        self._can_free = on_gpu
        self._requests: dict[str, int] = {}

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        """See :meth:`grpo_rl.engines.base.Engine.generate`."""
        assert not self._asleep, "wake() the engine before it generates"
        check_request(prompts, n, sampling, self.max_model_len)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, _parameters(n, sampling), use_tqdm=False)
        return [self._samples(output) for output in outputs]

    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.submit`."""
        assert not self._asleep, "wake() the engine before it generates"
        check_request([prompt], 1, sampling, self.max_model_len)
        parameters = _parameters(1, sampling)
        self._requests[str(request)] = request
        self._llm.llm_engine.add_request(str(request), {"prompt_token_ids": list(prompt)}, parameters)

    def step(self) -> list[tuple[int, Samples]]:
        """See :meth:`grpo_rl.engines.base.Engine.step`."""
        outputs = self._llm.llm_engine.step() if self._requests else []
        return [(self._requests.pop(out.request_id), self._samples(out)) for out in outputs if out.finished]

    def abort(self) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.abort`."""
        if self._requests:
            self._llm.llm_engine.abort_request(list(self._requests))
            self._requests.clear()

    def _samples(self, output: RequestOutput) -> Samples:
        return Samples.from_lists(
            [answer.token_ids for answer in output.outputs],
            [cast(FlatLogprobs, answer.logprobs).logprobs for answer in output.outputs],
            [answer.finish_reason == "length" for answer in output.outputs],
            self.version,
        )

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.update_weights`."""
        self._llm.collective_rpc("receive_weights", args=([(name, tensor.detach()) for name, tensor in weights],))
        # What was cached under the old weights must not be read under the new ones.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache after a weight update: requests are still running")
        self.version = version

    def fingerprints(self, shapes: Mapping[str, torch.Size]) -> dict[str, int]:
        """See :meth:`grpo_rl.engines.base.Engine.fingerprints`."""
        shards = self._llm.collective_rpc("held_fingerprints", args=(dict(shapes), self.dtype))
        return {name: add(*(shard[name] for shard in shards)) for name in shapes}

    def sleep(self) -> None:
        """Frees the KV cache and moves weights to host memory; on CPU, where there is nothing to free, a mark only."""
        if self._can_free:
            self._llm.sleep(level=1)
        self._asleep = True

    def wake(self) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.wake`."""
        if self._asleep and self._can_free:
            self._llm.wake_up()
        self._asleep = False

    def close(self) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.close`."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()
        LAYERWISE_INFO.clear()  # vLLM's notes on reloaded layers, which refer back to the layers
        gc.collect()


def _parameters(n: int, sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class WeightReceiver:
    """What vLLM's workers learn from us: to take weights by their checkpoint names, and to say what they hold."""

    model_runner: Any  # the worker's

    def receive_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """Loads the weights in place."""
        self.model_runner.reload_weights(weights_iterator=iter(weights))

    def held_fingerprints(self, shapes: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, int]:
        """This worker's share of the fingerprint of each checkpoint tensor, 0 where another worker counts it."""
        model = self.model_runner.get_model()
        held: dict[tuple[str, str], Tensor] = {}
        return {name: _shard_fingerprint(model, name, shape, dtype, held) for name, shape in shapes.items()}


def _shard_fingerprint(
    model: torch.nn.Module, name: str, shape: torch.Size, dtype: torch.dtype, held: dict[tuple[str, str], Tensor]
) -> int:
    path, _, kind = name.rpartition(".")
    module, index = _module_of(model, path)
    # A fused module serves several names; what it holds is read once.
    key = (str(id(module)), kind)
    if key not in held:
        held.clear()
        held[key] = _read(module, kind, dtype)
    whole = held[key]
    rank = getattr(module, "tp_rank", 0)
    if isinstance(module, VocabParallelEmbedding):
        # The vocabulary is padded, and split by rows.
        first = module.shard_indices.org_vocab_start_index
        return fingerprint(whole[: module.shard_indices.num_org_elements], row_start=first)
    if isinstance(module, RowParallelLinear):
        if kind == "bias":
            return fingerprint(whole) if rank == 0 else 0
        return fingerprint(whole, column_start=rank * whole.shape[1])
    if isinstance(module, LinearBase) and hasattr(module, "output_partition_sizes"):
        sizes = module.output_partition_sizes
        rows = whole.split(list(sizes))[index]
        if isinstance(module, QKVParallelLinear) and index > 0:
            # With fewer key-value heads than workers, several workers hold the same head; the first one counts it.
            rank, copy = divmod(rank, module.num_kv_head_replicas)
            if copy:
                return 0
        return fingerprint(rows, row_start=rank * sizes[index])
    # Anything else is replicated: the first worker counts it.
    if tuple(whole.shape) != tuple(shape):
        raise LookupError(f"{name}: vLLM holds {tuple(whole.shape)} of {tuple(shape)} in {type(module).__name__}")
    return fingerprint(whole) if torch.distributed.get_rank() == 0 else 0


def _module_of(model: torch.nn.Module, path: str) -> tuple[torch.nn.Module, int]:
    """The module that holds a checkpoint's module, and which of its fused parts that is."""
    parent, _, leaf = path.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        if leaf in parts:
            leaf, index = fused, parts.index(leaf)
            break
    else:
        index = 0
    try:
        return model.get_submodule(f"{parent}.{leaf}" if parent else leaf), index
    except AttributeError as error:
        raise LookupError(f"vLLM's {type(model).__name__} has no module for the checkpoint's {path!r}") from error


def _read(module: torch.nn.Module, kind: str, dtype: torch.dtype) -> Tensor:
    """The tensor that the module computes with."""
    tensor = getattr(module, kind)
    if tensor.numel() or kind != "weight":
        return tensor.to(dtype)
    # On CPU the weight has gone into a packed form that only a GEMM can read. One-hot inputs read it exactly: every
    # output is one weight plus zeros.
    columns = module.input_size_per_partition
    one_hot = torch.eye(columns, dtype=dtype)
    return cast(LinearBase, module).quant_method.apply(module, one_hot, None).T
