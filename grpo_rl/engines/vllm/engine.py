"""vLLM as an engine, in the training process: the production engine on GPU and on CPU.

Only this file and the vllm_*.py beside it import vllm. Checked with vLLM 0.32.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from grpo_rl.engines.base import ADAPTER_NAME, Samples, Sampling, check_request, digest
from grpo_rl.engines.fingerprint import add, fingerprint, same_or_none

# Read by vLLM at import. In-process: a second process would take half a minute to start and copy every weight twice.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])

# vLLM's own use of torch, nothing a user could change.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")

from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.sampling_params import RequestOutputKind

from grpo_rl.engines.vllm.cpu import (
    cpu_settings,
    note_what_is_packed,
    packed_heads,
    read_by_product,
    refresh_heads,
)
from grpo_rl.engines.vllm.lora import (
    adapter_request,
    adapter_settings,
    held_factor_fingerprint,
    hold_adapter,
    without_adapter,
)

if TYPE_CHECKING:  # it needs this module
    from grpo_rl.engines.vllm.cpu_direct import Place, Places

LOG = logging.getLogger(__name__)

# Before any engine packs its weights: direct writes keep the notes up to date.
note_what_is_packed()


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
        adapter_rank: more than 0: the engine holds a LoRA adapter of this rank beside its weights.
        adapter_targets: last names of the layers that it adapts, as the checkpoint has them.

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
        enforce_eager: bool = True,
        dtype: str = "bfloat16",
        max_num_seqs: int = 256,
        adapter_rank: int = 0,
        adapter_targets: Sequence[str] = (),
    ) -> None:
        self.version = 0
        self.max_model_len = max_model_len
        self._asleep = False
        self.dtype = getattr(torch, dtype)
        self.takes_adapters = adapter_rank > 0
        self._adapter: LoRARequest | None = None
        self._in_process = tensor_parallel_size == 1
        settings = engine_settings(
            model,
            max_model_len,
            seed,
            tensor_parallel_size,
            gpu_memory_utilization,
            enforce_eager,
            self.dtype,
            max_num_seqs,
            adapter_rank,
            adapter_targets,
        )
        receiver = f"{__name__}.{WeightReceiver.__name__}"
        self._llm = LLM(**settings, use_tqdm_on_load=False, worker_extension_cls=receiver)
        # vLLM freezes the garbage collector's view of what exists, to spare an engine's own process work. Here that
        # takes in the trainer, whose cycles would never be freed: a sweep would keep every job's model.
        gc.unfreeze()
        self._can_free = torch.cuda.is_available()
        self._requests: dict[str, int] = {}

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Samples]:
        """See :meth:`grpo_rl.engines.base.Engine.generate`."""
        assert not self._asleep, "wake() the engine before it generates"
        check_request(prompts, n, sampling, self.max_model_len)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(
            requests, sampling_parameters(n, sampling), use_tqdm=False, lora_request=self._adapter
        )
        return [samples_of(output, self.version) for output in outputs]

    def submit(self, request: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.submit`."""
        assert not self._asleep, "wake() the engine before it generates"
        check_request([prompt], 1, sampling, self.max_model_len)
        parameters = sampling_parameters(1, sampling)
        self._requests[str(request)] = request
        self._llm.llm_engine.add_request(
            str(request), {"prompt_token_ids": list(prompt)}, parameters, lora_request=self._adapter
        )

    def step(self) -> list[tuple[int, Samples]]:
        """See :meth:`grpo_rl.engines.base.Engine.step`."""
        outputs = self._llm.llm_engine.step() if self._requests else []
        return [(self._requests.pop(out.request_id), samples_of(out, self.version)) for out in outputs if out.finished]

    def abort(self) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.abort`."""
        if self._requests:
            self._llm.llm_engine.abort_request(list(self._requests))
            self._requests.clear()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`grpo_rl.engines.base.Engine.update_weights`."""
        factors: dict[str, Tensor] = {}
        own = _without_factors(weights, factors)
        if first := next(own, None):
            own = chain([first], own)
            # Another process gets its weights a layer at a time, so that never more than one is held to be sent.
            for part in [own] if self._in_process else _by_layer(own):
                self._llm.collective_rpc("receive_weights", args=(part,))
        if factors:
            self._llm.collective_rpc("receive_adapter", args=(factors,))
            self._adapter = adapter_request(version)
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
        if self._can_free and not self._asleep:
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


def engine_settings(
    model: str | Path,
    max_model_len: int,
    seed: int,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    enforce_eager: bool,
    dtype: torch.dtype,
    max_num_seqs: int,
    adapter_rank: int,
    adapter_targets: Sequence[str],
) -> dict[str, Any]:
    """Arguments of vLLM's engines, in this process or in another; the names are :class:`VLLMEngine`'s.

    Raises:
        ValueError: vLLM has no kernels for adapters in this dtype.
    """
    on_gpu = torch.cuda.is_available()
    gpu_settings = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True}
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
        "enforce_eager": enforce_eager,
        "max_num_seqs": max_num_seqs,
        "disable_log_stats": True,
        **(gpu_settings if on_gpu else cpu_settings(model, dtype, max_model_len, max_num_seqs, tensor_parallel_size)),
        **(adapter_settings(adapter_rank, adapter_targets, dtype, on_gpu) if adapter_rank else {}),
    }


def sampling_parameters(n: int, sampling: Sampling) -> SamplingParams:
    """What vLLM is to be asked for: ids and the log-probability of each, once an answer is whole."""
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


def samples_of(output: RequestOutput, version: int) -> Samples:
    """The answers of a request that is finished."""
    return Samples.from_lists(
        [answer.token_ids for answer in output.outputs],
        [cast(FlatLogprobs, answer.logprobs).logprobs for answer in output.outputs],
        [answer.finish_reason == "length" for answer in output.outputs],
        version,
    )


class WeightReceiver:
    """What vLLM's workers learn from us: to take weights by their checkpoint names, and to say what they hold.

    A worker that holds a whole model on a CPU looks where each tensor went after vLLM has loaded all of them
    (`grpo_rl.engines.vllm.cpu_direct`). Where it finds them, later weights are put there and read from there: vLLM
    packs every layer anew, and offers no way to read what it has packed but a product with an identity matrix.
    """

    model_runner: Any  # the worker's
    _places: Places | None = None
    _written: frozenset[str] = frozenset()
    """Tensors that were put into their places."""
    _read_there: frozenset[str] = frozenset()
    """Tensors among those of which a product has shown that what lies in their places is what it is made with."""

    def receive_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the weights in place; those that do not come stay."""
        if places := self._known_places():
            rest: list[tuple[str, Tensor]] = []
            # All of a layer or none: vLLM loads a fused layer when all of its parts have come.
            for part in _by_layer(weights):
                if all(self._fits(places.get(name), tensor) for name, tensor in part):
                    for name, tensor in part:
                        cast("Place", places.get(name)).write(0, tensor.reshape(-1))
                    self._written |= {name for name, _ in part}
                else:
                    rest += part
            if not rest:
                return
            weights = rest
        model = self.model_runner.get_model()
        loaded: dict[str, tuple[torch.Size, int]] = {}
        is_whole = torch.distributed.get_world_size() == 1 and next(model.parameters()).device.type == "cpu"
        weights = _noting_digests(weights, loaded) if is_whole else iter(weights)
        self.model_runner.reload_weights(weights_iterator=weights)
        refresh_heads(model)
        self._places = find_places(model, loaded)
        self._written = self._read_there = frozenset()

    def _known_places(self) -> Places | None:
        """Returns where tensors lie; None where that isn't known, or the model has been seen to have others."""
        if self._places is not None and not self._places.still_hold():
            self._places = None
        return self._places

    def _fits(self, place: Place | None, tensor: Tensor) -> bool:
        """Whether the tensor can be put into the place as it is."""
        dtype = self.model_runner.model_config.dtype
        return place is not None and place.shape == tensor.shape and tensor.dtype == dtype

    def receive_adapter(self, factors: dict[str, Tensor]) -> None:
        """Puts the adapter in the place of the one before."""
        hold_adapter(self.model_runner, factors)

    def held_fingerprints(self, shapes: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, int]:
        """This worker's share of the fingerprint of each checkpoint tensor, 0 where another worker counts it."""
        model = self.model_runner.get_model()
        held: dict[tuple[str, str], Tensor] = {}
        shares = {}
        places = self._known_places()
        for name, shape in shapes.items():
            place = places.get(name) if places and name in self._written else None
            if factor := ADAPTER_NAME.fullmatch(name):
                module, index = module_of(model, factor["layer"])
                shares[name] = held_factor_fingerprint(self.model_runner, module, factor["part"], index)
            elif place and name in self._read_there:
                shares[name] = place.fingerprint(dtype)
            else:
                shares[name] = _shard_fingerprint(model, name, shape, dtype, held)
                if place and place.fingerprint(dtype) == shares[name]:
                    self._read_there |= {name}
                elif place:  # what was put there is not what the product is made with
                    self._places = None
        return shares


def find_places(model: torch.nn.Module, loaded: Mapping[str, tuple[torch.Size, int]]) -> Places | None:
    """Finds where the tensors went that vLLM has just loaded; None where it isn't known of all of the model's.

    Args:
        loaded: shape and digest of each.
    """
    if not loaded or next(model.parameters()).device.type != "cpu":
        return None
    try:
        from grpo_rl.engines.vllm.cpu_direct import Places

        return Places(model, loaded)
    except LookupError as error:
        # As text: a handler that keeps the error would keep the engine, by the frames of its traceback.
        LOG.info("Weights go on coming by vLLM's `reload_weights`: %s", str(error))
    except (AttributeError, ImportError, TypeError, ValueError):
        # Nobody promises the names that are looked for, and vLLM's `reload_weights` needs none of them.
        LOG.warning("This vLLM is laid out in an unknown way; weights come by its `reload_weights`", exc_info=True)
    return None


def _noting_digests(
    weights: Iterable[tuple[str, Tensor]], loaded: dict[str, tuple[torch.Size, int]]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        loaded[name] = tensor.shape, digest(tensor)
        yield name, tensor


def _without_factors(weights: Iterable[tuple[str, Tensor]], factors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights as they come, but for an adapter's, which are put into ``factors``."""
    for name, tensor in weights:
        if ADAPTER_NAME.fullmatch(name):
            factors[name] = tensor.detach()
        else:
            yield name, tensor.detach()


def _by_layer(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights of each of the model's layers, and what comes between.

    >>> names = ["embed.weight", "layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight", "norm.weight"]
    >>> [len(part) for part in _by_layer([(name, torch.zeros(1)) for name in names])]
    [1, 2, 1, 1]
    """
    number = re.compile(r".*?\.\d+\.")
    for _, part in groupby(weights, key=lambda weight: (number.match(weight[0]) or [""])[0]):
        yield list(part)


def _shard_fingerprint(
    model: torch.nn.Module, name: str, shape: torch.Size, dtype: torch.dtype, held: dict[tuple[str, str], Tensor]
) -> int:
    path, _, kind = name.rpartition(".")
    module, index = module_of(model, path)
    module = without_adapter(module)
    # A fused module serves several names; what it holds is read once.
    key = (str(id(module)), kind)
    if key not in held:
        held.clear()
        held[key] = _read(module, kind, dtype)
    whole = held[key]
    rank = getattr(module, "tp_rank", 0)
    if isinstance(module, VocabParallelEmbedding):
        # The vocabulary is padded, and split by rows.
        first, rows = module.shard_indices.org_vocab_start_index, module.shard_indices.num_org_elements
        # What is looked up is one thing, what a head on CPU multiplies by another: both have to be what was sent.
        heads = (head for head in packed_heads(model) if head.weight.data_ptr() == module.weight.data_ptr())
        forms = [whole, *(read_by_product(head, whole.shape[1], dtype) for head in heads)]
        return same_or_none(*(fingerprint(form[:rows], row_start=first) for form in forms))
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


def module_of(model: torch.nn.Module, path: str) -> tuple[torch.nn.Module, int]:
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
    # On CPU the weight has gone into a packed form that only a product can read.
    return read_by_product(cast(LinearBase, module), cast(int, module.input_size_per_partition), dtype)
