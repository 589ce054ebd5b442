"""Where each of a checkpoint's tensors lies in vLLM's model on a CPU, so that a part of one can be put there at once.

vLLM loads a fused layer when all its parts are there, allocates it anew, copies it, and packs it anew. A tensor whose
place is known needs none of that. Known are the places in dense layers, embeddings, heads and norms, of models of which
nothing else is made from weights. What is known is checked against what vLLM's own loading has put there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import xxhash
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from grpo_rl.engines.base import digest
from grpo_rl.engines.fingerprint import fingerprint, same_or_none
from grpo_rl.engines.vllm.cpu import packed_heads
from grpo_rl.engines.vllm.cpu_packed import LANES, Packed, handler_of, is_where_it_was, packed_weight
from grpo_rl.engines.vllm.engine import module_of
from grpo_rl.engines.vllm.lora import without_adapter

NORMS = (RMSNorm, GemmaRMSNorm, LayerNorm, torch.nn.LayerNorm)
STEP_BYTES = 1 << 19
"""Read once from memory, to be hashed, and then packed from the cache."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of a packed weight.

    Args:
        packed: the whole weight, of which these rows begin at ``first``.
        notes: what the weight was packed from, part by part (see `grpo_rl.engines.vllm.cpu.note_what_is_packed`).
        part: which of them these rows are.
    """

    packed: Packed
    first: int
    notes: list[int]
    part: int


@dataclass
class Place:
    """Where a tensor of a checkpoint lies: as it is, or packed, or both, like the weight of a tied head.

    Args:
        shape: of the tensor.
        plain: the rows of the parameter that are this tensor.
    """

    shape: torch.Size
    plain: Tensor | None = None
    packed: list[PackedRows] = field(default_factory=list)
    _hash: Any = field(default_factory=xxhash.xxh3_64)

    def write(self, first: int, values: Tensor) -> None:
        """Puts values there, from the ``first`` on; whoever begins at 0 and ends at the last has put a whole tensor.

        Args:
            values: flat and contiguous, whole rows.
        """
        columns = self.shape[-1] if len(self.shape) > 1 else 1
        if first == 0:
            self._hash = xxhash.xxh3_64()
            for there in self.packed:
                there.notes[there.part] = 0  # nothing, until all of it is there
        rows = values.view(-1, columns)
        step = max(LANES, STEP_BYTES // (columns * values.itemsize) // LANES * LANES)
        for start in range(0, len(rows), step):
            part, row = rows[start : start + step], first // columns + start
            self._hash.update(part.view(torch.uint8).numpy())
            if self.plain is not None:
                self.plain.view(-1, columns)[row : row + len(part)] = part
            for there in self.packed:
                there.packed.write(there.first + row, part.view(torch.int32))
        if first + len(values) == self.shape.numel():
            for there in self.packed:
                there.notes[there.part] = self._hash.intdigest()

    def holds_what_came(self) -> bool:
        """Whether what was last put there, all of it, is what is read from there."""
        return all(held == self._hash.intdigest() for held in self.digests())

    def digests(self) -> Iterator[int]:
        """Of what lies there, in each form, read from there."""
        return (digest(held) for held in self._read())

    def fingerprint(self, dtype: torch.dtype) -> int:
        """What `grpo_rl.engines.fingerprint` says of what lies there, in all forms.

        Args:
            dtype: of the weight.
        """
        return same_or_none(*(fingerprint(held.view(dtype)) for held in self._read()))

    def _read(self) -> Iterator[Tensor]:
        """What lies there, in each form."""
        if self.plain is not None:
            yield self.plain
        for there in self.packed:
            yield there.packed.read(there.first, self.shape[0])


class Places:
    """The places of all tensors of a model.

    Args:
        model: vLLM's, of one worker that holds all of it, on a CPU.
        loaded: shape, and digest, of each tensor of a checkpoint that vLLM has just loaded.

    Raises:
        LookupError: of a tensor or a part of the model it is not known; or what vLLM has put there is something else.
    """

    def __init__(self, model: torch.nn.Module, loaded: Mapping[str, tuple[torch.Size, int]]) -> None:
        self._model = model
        self._packed: dict[torch.nn.Module, tuple[Any, Packed | None]] = {}
        self._tensors: list[tuple[torch.nn.Module, str, Tensor]] = []
        _refuse_what_is_made_from_weights(model)
        self._places = {name: self._place(name, shape) for name, (shape, _) in loaded.items()}
        self._check_all_is_covered()
        self._unproven = set(self._places)
        for name, (_, came) in loaded.items():
            if any(held != came for held in self._places[name].digests()):
                raise LookupError(f"{name} is not where it was looked for after vLLM had loaded it")

    def get(self, name: str) -> Place | None:
        """The place of a tensor."""
        return self._places.get(name)

    def written_wrong(self, names: Iterable[str]) -> list[str]:
        """Those of the tensors, just written for the first time, that can't be read back from their places.

        Once is enough for a way of writing; whether memory still holds it is for whoever reads all of it back.
        """
        first = [name for name in names if name in self._unproven]
        wrong = [name for name in first if not self._places[name].holds_what_came()]
        self._unproven.difference_update(first)
        return wrong

    def still_hold(self) -> bool:
        """Whether the model has the same tensors, and the same packed weights, as when they were looked for."""
        return all(getattr(module, kind, None) is tensor for module, kind, tensor in self._tensors) and all(
            getattr(layer, "cpu_linear", None) is linear and (packed is None or is_where_it_was(packed))
            for layer, (linear, packed) in self._packed.items()
        )

    def _place(self, name: str, shape: torch.Size) -> Place:
        path, _, kind = name.rpartition(".")
        module, index = module_of(self._model, path)
        module = without_adapter(module)
        parameter = getattr(module, kind, None)
        if not isinstance(parameter, Tensor):
            raise LookupError(f"vLLM has no parameter {kind} in {type(module).__name__} for {name}")
        self._tensors.append((module, kind, parameter))
        if isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is UnquantizedEmbeddingMethod:
            heads = [head for head in packed_heads(self._model) if head.weight is parameter]
            first, rows, holders = 0, module.shard_indices.num_org_elements, heads
            tensor_parallel = module.tp_size
        elif isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
            sizes = list(getattr(module, "output_partition_sizes", None) or [module.output_size])
            first, rows, holders = sum(sizes[:index]), sizes[index], [module] if kind == "weight" else []
            tensor_parallel = module.tp_size
        elif type(module) in NORMS:
            first, rows, holders, tensor_parallel = 0, len(parameter), [], 1
        else:
            raise LookupError(f"{name} goes into {type(module).__name__}, of which nothing is known")
        packed = [
            PackedRows(weight, first, cast(Any, holder).cpu_linear.packed_from, index if holder is module else 0)
            for holder in holders
            if (weight := self._packed_weight(holder, parameter.element_size()))
        ]
        plain = parameter.data[first : first + rows] if parameter.numel() else None
        held = [plain.shape] if plain is not None else []
        held += [torch.Size([rows, there.packed.words * 4 // parameter.element_size()]) for there in packed]
        if not held or any(one != shape for one in held) or tensor_parallel > 1 or parameter.is_meta:
            raise LookupError(f"vLLM holds {name} as {held}, not as {shape}")
        return Place(shape, plain, packed)

    def _packed_weight(self, layer: torch.nn.Module, element_size: int) -> Packed | None:
        if layer not in self._packed:
            linear = cast(Any, layer).cpu_linear
            handler = handler_of(linear)
            self._packed[layer] = linear, handler and packed_weight(handler, element_size)
        return self._packed[layer][1]

    def _check_all_is_covered(self) -> None:
        """A parameter that no tensor goes to would be made from another, in a way that is not known."""
        covered: Counter[int] = Counter()
        for place in self._places.values():
            if place.plain is not None:
                covered[place.plain.untyped_storage().data_ptr()] += place.plain.numel()
            for there in place.packed:
                covered[there.packed.blocks.data_ptr()] += place.shape[0]
        heads = set(packed_heads(self._model))
        for path, module in self._model.named_modules():
            for kind, parameter in module.named_parameters(recurse=False):
                whole = (
                    parameter[: cast(Any, module).shard_indices.num_org_elements] if _is_table(module) else parameter
                )
                if covered[parameter.untyped_storage().data_ptr()] != whole.numel():
                    raise LookupError(f"{path}.{kind} is not made of the checkpoint's tensors alone")
            # vLLM packs a table beside its head too, and never multiplies by that.
            packs = hasattr(module, "cpu_linear") and (module in heads or not _is_table(module))
            if not packs or handler_of(cast(Any, module).cpu_linear) is None:
                continue
            _, packed = self._packed.get(module, (None, None))
            rows = cast(Any, module).shard_indices.num_org_elements if _is_table(module) else packed and packed.owner.n
            if packed is None or covered[packed.blocks.data_ptr()] != rows:
                raise LookupError(f"{path} multiplies by something else than the checkpoint's tensors")


def _is_table(module: torch.nn.Module) -> bool:
    return isinstance(module, VocabParallelEmbedding)


def _refuse_what_is_made_from_weights(model: torch.nn.Module) -> None:
    """Raises LookupError for a layer that computes something from weights when they are loaded."""
    for path, module in model.named_modules():
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            raise LookupError(f"{path}, of {type(module).__name__}, makes something of weights")
