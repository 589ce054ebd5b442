"""Weights inside vLLM, by the checkpoint's names: fingerprints of what its layers compute with, and writing over it.

On a CPU vLLM multiplies by packed copies of its weights, which it offers no way to read. There are two proofs: a
digest, taken of what a weight was packed from when it was packed (`grpo_rl.engines.vllm.cpu.record_packing`); and a
fingerprint of the weight itself, read exactly by a product with an identity matrix, which takes far longer.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any, SupportsInt, cast

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank as tensor_parallel_rank
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from grpo_rl.engines.fingerprint import digest, fingerprint
from grpo_rl.engines.vllm.cpu import packed_from, packed_heads, read_by_product, rows_of
from grpo_rl.engines.vllm.lora import without_adapter
from grpo_rl.engines.vllm.own_forms import EXPERT_NAME, expert_place, own_form

HELD_BYTES = 1 << 29
"""Bytes of tensors that are held before they are written: some are temporary."""
DERIVED = ("MLA", "MoE", "Experts", "LoRA")
"""Words in the class names of layers that compute with something made from their weights, or hold them elsewhere."""


def held_digest(model: torch.nn.Module, name: str, dtype: torch.dtype) -> int:
    """Digest of the weight that the model computes with; of a packed one the digest recorded when it was packed.

    One worker has to hold all of it.

    Raises:
        LookupError: the model holds no such weight that can be read.
    """
    name = name_in(model, name)
    if EXPERT_NAME.fullmatch(name):
        place = expert_place(model, name)
        assert place, "one worker holds all experts"
        held = place.held_digest()
        return digest(place.part_of(place.read())) if held is None else held
    path, _, kind = name.rpartition(".")
    if (own := own_form(model, path, kind, dtype)) is not None:
        return digest(own)
    module, _ = module_of(model, path)
    module = without_adapter(module)
    parts = parts_in(model, path, module)
    packed, tensor = packed_from(module), _tensor(module, kind, name)
    if packed and kind == "weight" and not isinstance(module, VocabParallelEmbedding):
        return packed[parts]
    if not tensor.numel():
        raise LookupError(f"vLLM holds no {name} that can be read")
    held = digest(rows_of(module, tensor.to(dtype), parts))
    if isinstance(module, VocabParallelEmbedding):
        # What is looked up is one thing, what a head on CPU multiplies by another: both have to be what was sent.
        heads = [head for head in packed_heads(model) if head.weight.data_ptr() == module.weight.data_ptr()]  # pyrefly: ignore[not-callable]
        return same_or_none(held, *(made[0, 1] for head in heads if (made := packed_from(head))))
    return held


def shard_fingerprint(
    model: torch.nn.Module,
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
    last_read: dict[tuple[str, str], Tensor],
    fingerprint: Callable[..., SupportsInt] = fingerprint,
) -> SupportsInt:
    """This worker's share of the fingerprint of the weight that the model computes with.

    Args:
        last_read: the tensor that the call before has read, as a fused layer serves several names; updated.
        fingerprint: computes fingerprints, now or later.

    Returns:
        A number that adds up over workers; 0 where another worker counts it.

    Raises:
        LookupError: the model has no place for the name, or one of another shape.
    """
    name = name_in(model, name)
    if EXPERT_NAME.fullmatch(name):
        place = expert_place(model, name)
        if place is None:
            return 0
        tensor = _once(last_read, (str(id(place.layer)), place.kind), place.read)
        return fingerprint(place.part_of(tensor).to(dtype), **place.starts)
    path, _, kind = name.rpartition(".")
    if (own := own_form(model, path, kind, dtype)) is not None:
        return fingerprint(own, row_start=len(own) * tensor_parallel_rank())
    module, _ = module_of(model, path)
    module = without_adapter(module)
    whole = _once(last_read, (str(id(module)), kind), lambda: _read(module, kind, name, dtype))
    rank = getattr(module, "tp_rank", 0)
    if isinstance(module, VocabParallelEmbedding):
        # The vocabulary is padded, and split by rows.
        first, rows = module.shard_indices.org_vocab_start_index, module.shard_indices.num_org_elements
        # What is looked up is one thing, what a head on CPU multiplies by another: both have to be what was sent.
        heads = (head for head in packed_heads(model) if head.weight.data_ptr() == module.weight.data_ptr())  # pyrefly: ignore[not-callable]
        forms = [whole, *(read_by_product(head, whole.shape[1], dtype) for head in heads)]
        marks = [fingerprint(form[:rows], row_start=first) for form in forms]
        return same_or_none(*map(int, marks)) if len(marks) > 1 else marks[0]
    if isinstance(module, RowParallelLinear):
        if kind == "bias":
            return fingerprint(whole) if rank == 0 else 0
        return fingerprint(whole, column_start=rank * whole.shape[1])
    if isinstance(module, LinearBase) and hasattr(module, "output_partition_sizes"):
        parts = parts_in(model, path, module)
        if isinstance(module, QKVParallelLinear) and parts[0] > 0:
            # With fewer key-value heads than workers, several workers hold the same head; the first one counts it.
            rank, copy = divmod(rank, module.num_kv_head_replicas)
            if copy:
                return 0
        if parts[1] - parts[0] > 1 and getattr(module, "tp_size", 1) > 1:
            raise LookupError(f"{name} is split over workers part by part, which can't be read back")
        return fingerprint(rows_of(module, whole, parts), row_start=rank * module.output_partition_sizes[parts[0]])
    # Anything else is replicated: the first worker counts it.
    if tuple(whole.shape) != tuple(shape):
        raise LookupError(f"{name}: vLLM holds {tuple(whole.shape)} of {tuple(shape)} in {type(module).__name__}")
    return fingerprint(whole) if torch.distributed.get_rank() == 0 else 0


def name_in(model: torch.nn.Module, name: str) -> str:
    """The checkpoint's name as vLLM's model has it, but for the layers that vLLM fuses."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    return replace(mapper, orig_to_new_stacked={}).map_name(name) or name


def module_of(model: torch.nn.Module, path: str) -> tuple[torch.nn.Module, int]:
    """The module that holds a checkpoint's module, and which of its fused parts that is.

    Raises:
        LookupError: there is none.
    """
    parent, _, leaf = path.rpartition(".")
    index = 0
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        if leaf in parts:
            leaf, index = fused, parts.index(leaf)
            break
    try:
        return model.get_submodule(f"{parent}.{leaf}" if parent else leaf), index
    except AttributeError as error:
        message = f"vLLM's {type(model).__name__} has no {path!r}; set inference_model.engine=transformers"
        raise LookupError(message) from error


def parts_in(model: torch.nn.Module, path: str, module: torch.nn.Module) -> tuple[int, int]:
    """The first of a fused ``module``'s parts that are the checkpoint's at ``path``, and the one after the last."""
    count, leaf = len(getattr(module, "output_partition_sizes", [0])), path.rpartition(".")[2]
    names = next((names for names in getattr(model, "packed_modules_mapping", {}).values() if leaf in names), [leaf])
    if len(names) == count:
        return names.index(leaf), names.index(leaf) + 1
    if len(names) == 1:
        return 0, count
    # Some names stand for several parts: the class that loads them decides for which.
    for part in model.modules():
        mapper: Any = getattr(part, "hf_to_vllm_mapper", None)
        found = mapper._map_name_with_shard(f".{leaf}.") if mapper else None
        if found and found[1] is not None:
            shards = found[1] if isinstance(found[1], tuple) else (found[1],)
            return shards[0], shards[-1] + 1
    raise LookupError(f"vLLM's {type(model).__name__} does not say which rows of {type(module).__name__} are {path!r}")


def _once(last_read: dict[tuple[str, str], Tensor], key: tuple[str, str], read: Callable[[], Tensor]) -> Tensor:
    if key not in last_read:
        last_read.clear()  # before another is read
        last_read[key] = read()
    return last_read[key]


def _tensor(module: torch.nn.Module, kind: str, name: str) -> Tensor:
    try:
        return getattr(module, kind)
    except AttributeError as error:
        message = f"{name}: vLLM's {type(module).__name__} has no {kind}; set inference_model.engine=transformers"
        raise LookupError(message) from error


def _read(module: torch.nn.Module, kind: str, name: str, dtype: torch.dtype) -> Tensor:
    tensor = _tensor(module, kind, name)
    if tensor.numel() or kind != "weight":
        return tensor.to(dtype)
    # On CPU the weight has gone into a packed form that only a product can read.
    columns = getattr(module, "input_size_per_partition", None) or module.input_size  # a replicated layer has no parts
    return read_by_product(cast(LinearBase, module), cast(int, columns), dtype)


def same_or_none(*fingerprints: int) -> int:
    """Fingerprint of a tensor that is held in several forms; a number that none of them has, where they differ.

    A correct form must not hide a wrong one.

    >>> same_or_none(7, 7), same_or_none(7, 0)
    (7, 1)
    """
    found = set(fingerprints)
    return found.pop() if len(found) == 1 else next(number for number in count() if number not in found)


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
    for given, tensor in weights:
        name = name_in(model, given)
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
