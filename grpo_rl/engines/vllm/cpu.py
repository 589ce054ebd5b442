"""vLLM on a CPU: arguments and kernels that it does not choose by itself, and its packed weights. For vLLM 0.32.

This module also has vLLM return kept sets, which its runner for CPUs leaves out, and load models without torchvision,
which the files of text and image models import.
"""

import functools
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoConfig, logging
from transformers.utils import is_torchvision_available
from vllm import _custom_ops, ir
from vllm.kernels import vllm_c
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models import registry
from vllm.triton_utils import dispatcher
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample.logits_processor import MinPLogitsProcessor
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from grpo_rl.engines.fingerprint import digest

PROVIDER = "grpo_rl_cpu"
NORMS = {"rms_norm": vllm_c.rms_no_var_size, "fused_add_rms_norm": vllm_c.rms_add_no_var_size}
"""Operation -> which arguments its kernel takes; PyTorch does the others."""
BLOCK = 32
"""Tokens of a KV-cache block; vLLM's own choice is 128. A prompt's last block, if not full, is computed for each of its
n responses."""
CACHE_BYTES = 2 << 30
"""Upper bound of the KV cache; where ``VLLM_CPU_KVCACHE_SPACE`` is set, vLLM takes that instead, in GiB."""


def cpu_arguments(
    model: str | Path, dtype: torch.dtype, max_model_len: int, max_num_seqs: int, tensor_parallel_size: int
) -> dict[str, Any]:
    """Further arguments of `vllm.LLM` on a CPU, with measurements in docs/log.md; ours are those of `VLLMBase`."""
    offer_norms()
    blocks = max_num_seqs * math.ceil(max_model_len / BLOCK) + 1  # vLLM keeps one for itself
    longest = blocks * BLOCK * _token_bytes(model, dtype, tensor_parallel_size)
    if has_states(model):
        longest = CACHE_BYTES  # vLLM makes a block as large as a layer's state
    return {
        "block_size": BLOCK,
        # No more than the longest responses fill: vLLM writes zeros to all of it at its start.
        "kv_cache_memory_bytes": min(CACHE_BYTES, longest),
        "ir_op_priority": {name: [PROVIDER] for name in NORMS},
    }


def has_states(model: str | Path) -> bool:
    layers = getattr(AutoConfig.from_pretrained(model).get_text_config(), "layer_types", None) or ()
    return any(not layer.endswith("attention") or layer.startswith("linear") for layer in layers)


def _token_bytes(model: str | Path, dtype: torch.dtype, tensor_parallel_size: int) -> int:
    """Bytes of a token's keys and values on a device, as if all layers had the same shape."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * dtype.itemsize * config.num_hidden_layers * max(1, heads // tensor_parallel_size) * width


@functools.cache
def offer_norms() -> None:
    """Registers vLLM's C++ norms for CPUs: it has compiled them, and offers them to GPUs alone."""
    for name, takes in NORMS.items():
        operation = getattr(ir.ops, name)
        kernel = operation.impls["vllm_c"]
        takes = _where_rounded(name, takes, kernel.impl_fn)
        operation.register_impl(PROVIDER, supports_args=takes, inplace=kernel.inplace)(_on_rows(kernel.impl_fn))


def _where_rounded(name: str, takes: Callable[..., bool], kernel: Callable[..., Any]) -> Callable[..., bool]:
    """Leaves bfloat16 to PyTorch where the kernel cuts off the bits that bfloat16 has no room for.

    vLLM's kernels for CPUs without AVX512-BF16 do: a 30-layer model's log-probs were 0.12 nats off.
    """
    one = torch.ones(1, 32, dtype=torch.bfloat16)
    rest = (torch.zeros_like(one),) if name == "fused_add_rms_norm" else ()
    normed = kernel(one, *rest, one[0].clone(), 1e-5)  # 0.999995, which rounds to 1
    rounds = bool(((normed[0] if rest else normed) == 1).all())

    @functools.wraps(takes)
    def rounded(x: Tensor, *args: Any, **keywords: Any) -> bool:
        return takes(x, *args, **keywords) and (rounds or x.dtype != torch.bfloat16)

    return rounded


def _on_rows(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with its tensors' rows one after the other in memory, as it takes them to be.

    Heads of queries that are cut out of a fused product are not: it would silently normalise other numbers.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **keywords: Any) -> Any:
        return kernel(*(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args), **keywords)

    return call


@functools.cache
def rotate_heads_in_rows() -> None:
    """Has vLLM's C++ rotary embedding for CPUs get queries and keys as [tokens, heads x size].

    Of [tokens, heads, size], as LFM2 passes them, it silently rotates something else.
    """
    rotate = _custom_ops.rotary_embedding

    @functools.wraps(rotate)
    def rotary_embedding(
        positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, *args: Any, **keywords: Any
    ) -> None:
        given = [x for x in (query, key) if x is not None]
        rows = [x.reshape(positions.shape[-1], -1) for x in given]
        rotate(positions, rows[0], rows[1] if len(rows) > 1 else None, head_size, *args, **keywords)
        for x, rotated in zip(given, rows, strict=True):  # in place
            if rotated.data_ptr() != x.data_ptr():
                x.copy_(rotated.view_as(x))

    _custom_ops.rotary_embedding = rotary_embedding


@functools.cache
def attend_without_amx() -> None:
    """Has vLLM's attention for CPUs take its AVX-512 kernel where it would take AMX's.

    AMX's died of SIGILL at about every third start of an engine on a Xeon (docs/log.md).
    """
    choose = cpu_attn._get_attn_isa

    @functools.wraps(choose)
    def kernel(*args: Any, **keywords: Any) -> str:
        chosen = choose(*args, **keywords)
        return "vec" if chosen == "amx" else chosen

    cpu_attn._get_attn_isa = kernel


@functools.cache
def give_drafts_their_temperature() -> None:
    """Has vLLM's kernels for CPUs write each sequence's temperature to its drafts.

    Its own wrapper converts what the kernel should write into, and so leaves it as it was: drafts were checked at a
    temperature out of memory that was never set.
    """

    def expand(output: Tensor, values: Tensor, ends: Tensor, replaced: float, by: float, *_: Any) -> None:
        output.copy_(values.where(values != replaced, by).repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))

    cpu_triton_utils._expand_kernel_impl = expand  # pyrefly: ignore[bad-assignment]


@functools.cache
def skip_proxies() -> None:
    """Has vLLM look for kernels in modules without Werkzeug's proxies alone.

    Outside of a request a proxy of Flask's raises at any look at it: vLLM did not start where Flask was imported, as
    MLflow's server does.
    """
    rebind = dispatcher._rebind_kernels

    @functools.wraps(rebind)
    def rebind_kernels(*args: Any, **keywords: Any) -> None:
        modules = {name: module for name, module in list(sys.modules.items()) if not _has_proxies(module)}
        dispatcher.sys = types.SimpleNamespace(modules=modules)  # pyrefly: ignore[bad-assignment]
        try:
            rebind(*args, **keywords)
        finally:
            dispatcher.sys = sys

    dispatcher._rebind_kernels = rebind_kernels


def _has_proxies(module: Any) -> bool:
    values = list(getattr(module, "__dict__", {}).values())
    return any(type(value).__module__ == "werkzeug.local" for value in values)


def refresh_heads(model: torch.nn.Module) -> None:
    """Packs every head's weight anew; to be called after weights were reloaded.

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


@functools.cache
def record_packing() -> None:
    """Has every weight that vLLM packs from now on in this process carry digests of what it was packed from.

    Only a product can read a packed weight, which takes longer than loading it. The record is an attribute of the
    packed form itself, so a layer that is not packed anew when its weight is replaced keeps the old one.
    """
    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_record(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        pack(layer, remove_weight)
        linear = getattr(layer, "cpu_linear", None)
        # PyTorch's own product, which vLLM falls back on, packs nothing and holds nothing.
        if isinstance(linear, types.FunctionType) and linear.__closure__:
            cast(Any, linear).packed_from = _part_digests(layer, weight)

    utils.dispatch_cpu_unquantized_gemm = pack_and_record


def _part_digests(layer: torch.nn.Module, weight: Tensor) -> dict[tuple[int, int], int]:
    """Digests of each part of a fused layer, and of its first parts together; by first part and the one after the last.

    A name of the checkpoint stands for one part or for several, and which is known only of a whole model.
    """
    count = len(getattr(layer, "output_partition_sizes", [0]))
    runs = {(i, i + 1) for i in range(count)} | {(0, i + 1) for i in range(count)}
    return {run: digest(rows_of(layer, weight, run)) for run in runs}


def packed_from(layer: torch.nn.Module) -> dict[tuple[int, int], int] | None:
    """Recorded digests of what the layer's packed weight was made from, by parts; None where it is not packed."""
    return getattr(getattr(layer, "cpu_linear", None), "packed_from", None)


def rows_of(layer: torch.nn.Module, whole: Tensor, parts: tuple[int, int]) -> Tensor:
    """The rows of a layer's tensor that are the checkpoint's.

    Args:
        parts: the first of a fused layer's parts that is meant, and the one after the last.
    """
    if isinstance(layer, VocabParallelEmbedding):
        return whole[: layer.shard_indices.num_org_elements]  # the vocabulary is padded
    sizes = getattr(layer, "output_partition_sizes", None)
    if not sizes or sum(sizes) != len(whole):
        return whole
    return whole[sum(sizes[: parts[0]]) : sum(sizes[: parts[1]])]


def read_by_product(module: LinearBase | VocabParallelEmbedding, columns: int, dtype: torch.dtype) -> Tensor:
    """The weight that the layer multiplies by, exactly, whatever form it is packed in.

    Every output of a one-hot input is one weight plus zeros.
    """
    return cast(Any, module).quant_method.apply(module, torch.eye(columns, dtype=dtype), None).T


@functools.cache
def record_kept() -> None:
    """Has vLLM return the kept sets of this process's samples, in every step in which a request cuts anything off.

    They are read off the log-probabilities that it samples from, behind temperature, min-p, top-k and top-p: what was
    cut off has -inf. On a GPU vLLM does so by itself (``return_sampling_mask``); here the same fields of its outputs
    are filled in, so that all behind the runner is vLLM's own.
    """
    sampler, runner, scheduler = cast(Any, Sampler), cast(Any, GPUModelRunner), cast(Any, Scheduler)
    sample, sample_tokens, update = sampler.sample, runner.sample_tokens, scheduler.update_from_output

    def sample_and_record(self: Any, logits: Tensor, sampling_metadata: Any, *more: Any, **settings: Any) -> Any:
        sampled, log_probs = sample(self, logits, sampling_metadata, *more, **settings)
        processors = sampling_metadata.logitsprocs.argmax_invariant
        cuts = sampling_metadata.top_k is not None or sampling_metadata.top_p is not None
        cuts = cuts or any(isinstance(p, MinPLogitsProcessor) and p.min_p_count for p in processors)
        self.cut_log_probs = log_probs if cuts else None
        return sampled, log_probs

    def sample_tokens_and_return(self: Any, *arguments: Any) -> Any:
        self.sampler.cut_log_probs = None
        output = sample_tokens(self, *arguments)
        if self.sampler.cut_log_probs is not None:
            whole = getattr(output, "_model_runner_output", output)  # of an output that is still on its way
            whole.sampling_masks = kept_sets(self.sampler.cut_log_probs)
            self.sampler.cut_log_probs = None
        return output

    def update_with_kept(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Not by vLLM's own setting, which it refuses for this runner.
        self.return_sampling_mask = model_runner_output.sampling_masks is not None
        return update(self, scheduler_output, model_runner_output)

    sampler.sample, runner.sample_tokens = sample_and_record, sample_tokens_and_return
    scheduler.update_from_output = update_with_kept


def kept_sets(log_probs: Float[Tensor, "n V"]) -> SamplingMaskLists:
    """The ids that are not at -inf, row by row; none in rows where nothing is.

    >>> kept_sets(torch.tensor([[-1.0, -torch.inf, -2.0], [-1.0, -1.0, -1.0]])).slice_request(0, 1).to_nested_list()
    [[0, 2]]
    """
    kept = log_probs > -torch.inf
    kept &= ~kept.all(-1, keepdim=True)
    ids = kept.nonzero()[:, 1].to(torch.int32).numpy()
    return SamplingMaskLists(ids, np.concatenate([[0], kept.sum(-1).numpy()]).cumsum())


@functools.cache
def load_models_without_torchvision() -> None:
    """Has vLLM load its models' files in this process, and without torchvision if that is not installed.

    Files of text and image models import the image processors of transformers, which import torchvision. With a torch
    for CPUs the wheels of torchvision can't be imported, and text needs none of it.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return
    lazy: Any = registry._LazyRegisteredModel
    load = lazy.load_model_cls

    def load_model_cls(self: Any) -> type:
        with torchvision_stands_in():
            return load(self)

    lazy.load_model_cls = load_model_cls
    # Not in a process of its own, which spares a GPU's memory and here would know nothing of the stand-in.
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())


@contextmanager
def torchvision_stands_in() -> Iterator[None]:
    """A context in which torchvision can be imported, but nothing in it used."""
    is_torchvision_available()  # transformers keeps the result: it shall stay what it is outside
    finder, verbosity = _Finder(), logging.get_verbosity()
    hidden = sys.modules.get("torchvision", finder) is None  # by grpo_rl itself, as it can't be imported
    if hidden:
        del sys.modules["torchvision"]
    sys.meta_path.insert(0, finder)
    logging.set_verbosity_error()  # transformers would recommend to install it
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]
        if hidden:
            sys.modules["torchvision"] = None


class _StandIn(ModuleType):
    """A module all of whose names are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Finder:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
