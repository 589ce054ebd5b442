"""Layers whose weights vLLM holds in forms of its own, for the proof of delivery: experts, and those with a state.

For vLLM 0.32. Next to the checkpoint's tensors, layers that carry a state compute with forms of their own: Mamba with
the negative exponentials of the logarithms ``A_log``, and convolutions with copies, packed where the CPU can.

On a CPU vLLM packs an expert's weights, as it does a linear layer's (`grpo_rl.engines.vllm.held`), but no product reads
them back: an expert's output is not linear in them. Packing only moves elements, though, so packing their numbers shows
where each one went; and packing again what was read has to give what is held.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from grpo_rl.engines.fingerprint import digest

EXPERT_NAME = re.compile(r"(?P<path>.+\.experts)\.(?P<number>\d+)\.(?P<projection>\w+)\.weight")
"""The checkpoint's name of one projection of one expert."""
GATE, UP, DOWN = range(3)
DECAY = ("A_log", "A")
"""The checkpoint's name of Mamba's logarithms, and vLLM's of what it makes of them."""


@dataclass(frozen=True)
class ExpertPlace:
    """The place where a worker holds one projection of one expert, or its share of it.

    Args:
        layer: vLLM's `RoutedExperts`.
        number: of the expert in this worker's tensors.
        projection: GATE, UP or DOWN.
        rank: of the worker among those that share each expert's rows.
    """

    layer: Any
    number: int
    projection: int
    rank: int

    @property
    def kind(self) -> str:
        """The layer's tensor that holds it."""
        return "w2_weight" if self.projection == DOWN else "w13_weight"

    @property
    def starts(self) -> dict[str, int]:
        """First row or column that this worker holds of the whole."""
        first = self.rank * self.layer.moe_config.intermediate_size_per_partition
        return {"column_start": first} if self.projection == DOWN else {"row_start": first}

    def part_of(self, tensor: Tensor) -> Tensor:
        """The projection, in the tensor of that kind with all experts, unpacked; vLLM may have padded it."""
        width = self.layer.moe_config.intermediate_size_per_partition
        expert = tensor[self.number]
        if self.projection == DOWN:
            return expert[:, :width]
        start = len(expert) // 2 if self.projection == UP else 0
        return expert[start : start + width]

    def held_digest(self) -> int | None:
        """Digest of the projection as it was packed, if what is held is what was packed from it; None where not."""
        packed = getattr(self.layer, "packed_from", None)
        if packed is None:
            return None
        return packed.get((self.projection, self.number, digest(getattr(self.layer, self.kind)[self.number])))

    def read(self) -> Tensor:
        """The tensor of that kind with all experts, as they came; LookupError: its form can't be read."""
        method, tensor = self.layer.quant_method, getattr(self.layer, self.kind)
        backend = getattr(method, "unquantized_backend", None)
        if backend == UnquantizedMoeBackend.CPU and is_packed(method):
            return unpacked(tensor, method.moe_kernel.fused_experts.isa)
        if backend in (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
            return tensor
        raise LookupError(
            f"vLLM computes this model's experts by {backend or type(method).__name__}, which holds their weights in a "
            "form of its own: what it holds can't be proven; set inference_model.engine=transformers"
        )


def expert_place(model: torch.nn.Module, name: str) -> ExpertPlace | None:
    """The place of an expert's weight that this worker holds; None where another worker does.

    Args:
        name: as vLLM's model has it, see :data:`EXPERT_NAME`.

    Raises:
        LookupError: the model has no such expert.
    """
    match = EXPERT_NAME.fullmatch(name)
    try:
        layer: Any = model.get_submodule(f"{match['path']}.routed_experts") if match else None
    except AttributeError:
        layer = None
    names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name] if layer else []
    if not match or not layer or match["projection"] not in names:
        raise LookupError(f"vLLM's {type(model).__name__} lacks {name!r}; set inference_model.engine=transformers")
    number = layer._map_global_expert_id_to_local_expert_id(int(match["number"]))
    shared = layer.moe_config.moe_parallel_config
    return None if number < 0 else ExpertPlace(layer, number, names.index(match["projection"]), shared.tp_rank)


def is_packed(method: Any) -> bool:
    """True if experts are packed on a CPU: not where AMD's library computes them."""
    return not method.moe_kernel.fused_experts._use_zentorch


@functools.cache
def record_expert_packing() -> None:
    """Has experts that vLLM packs from now on in this process carry digests of what they were packed from.

    It also has them packed whenever new weights come: vLLM 0.32 packs them when it starts, and later copies weights as
    they came over the packed ones.
    """
    process = unquantized.UnquantizedFusedMoEMethod.process_weights_after_loading

    def process_and_record(self: Any, layer: Any) -> None:
        if self.unquantized_backend != UnquantizedMoeBackend.CPU:
            process(self, layer)
            return
        places = [ExpertPlace(layer, e, part, 0) for part in (GATE, UP, DOWN) for e in range(layer.local_num_experts)]
        came = [digest(place.part_of(getattr(layer, place.kind))) for place in places]
        self.moe_kernel = None
        process(self, layer)
        layer.packed_from = None
        if is_packed(self):
            # Once for each tensor: gate and up of an expert are one.
            held = {(place.kind, place.number): getattr(layer, place.kind)[place.number] for place in places}
            marks = {of: digest(tensor) for of, tensor in held.items()}
            layer.packed_from = {
                (place.projection, place.number, marks[place.kind, place.number]): mark
                for place, mark in zip(places, came, strict=True)
            }

    unquantized.UnquantizedFusedMoEMethod.process_weights_after_loading = process_and_record


def unpacked(tensor: Tensor, isa: str) -> Tensor:
    """The experts' weights as they were before vLLM packed them; LookupError: packing did more than move elements."""
    experts, rows, columns = tensor.shape
    places = _places(rows, columns, tensor.dtype, isa)
    weights = torch.empty_like(tensor)
    weights.view(experts, -1)[:, places] = tensor.view(experts, -1)
    if not torch.equal(_bits(cpu_prepack_moe_weight(weights, isa)), _bits(tensor)):
        raise LookupError(f"vLLM packs experts on this CPU ({isa}) in a form that can't be read back")
    return weights


@functools.lru_cache(maxsize=4)
def _places(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """The place in an expert's weight of each element of its packed form, [rows x columns]."""
    numbers = torch.arange(rows * columns)
    bits = 8 * dtype.itemsize
    places = torch.zeros_like(numbers)
    for shift in range(0, 32, bits):  # as many bits of the numbers at a time as an element has
        digits = (numbers >> shift).to(torch.int16 if bits == 16 else torch.int32)
        moved = _bits(cpu_prepack_moe_weight(digits.view(dtype).view(1, rows, columns), isa)).reshape(-1)
        places += (moved.long() & ((1 << bits) - 1)) << shift
    return places


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@functools.cache
def record_decays() -> None:
    """Has each Mamba layer that vLLM builds from now on in this process keep the logarithms that it is given."""

    def composed(loader: Callable[..., None], fn: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def load_and_keep(param: Tensor, loaded_weight: Tensor) -> None:  # vLLM passes them by name
            loader(param, fn(loaded_weight))
            load_and_keep.came = loaded_weight.detach().clone()  # pyrefly: ignore[missing-attribute]

        return load_and_keep

    mamba_mixer2.composed_weight_loader = composed


def refresh_convolutions(model: torch.nn.Module) -> None:
    """Copies the convolutions' new weights to where Mamba computes with them; to be called after weights were reloaded.

    On a CPU that has bfloat16 instructions vLLM packs the weight that it loads, and Mamba goes on with the one that it
    had at the start.
    """
    for mixer in model.modules():
        if isinstance(mixer, MambaMixer2) and hasattr(mixer.conv1d, "_cpu_unpacked_conv_weight"):
            mixer.conv_weights.copy_(mixer.conv1d._cpu_unpacked_conv_weight)


def own_form(model: torch.nn.Module, path: str, kind: str, dtype: torch.dtype) -> Tensor | None:
    """The checkpoint's tensor, as the form of it shows that the layer computes with; None where that is the tensor.

    Raises:
        LookupError: what it was made from was not recorded.
    """
    try:
        module: Any = model.get_submodule(path)
        parent: Any = model.get_submodule(path.rpartition(".")[0])
    except AttributeError:  # part of a fused layer, or not there
        return None
    if isinstance(module, MambaMixer2) and kind in DECAY:
        return _decay(module).to(dtype)
    if kind != "weight":
        return None
    if isinstance(parent, MambaMixer2) and module is parent.conv1d:
        return parent.conv_weights[:, None].to(dtype)
    unpacked = getattr(module, "_cpu_unpacked_conv_weight", None)
    if unpacked is None:
        return None
    is_packed_from_it = torch.equal(_custom_ops.causal_conv1d_weight_pack(unpacked), module.weight)
    return (unpacked if is_packed_from_it else module.weight.view(unpacked.shape))[:, None].to(dtype)


def _decay(mixer: Any) -> Tensor:
    """This worker's logarithms: those that came, if they are what the layer's decay rates were made from."""
    came = getattr(getattr(mixer.A, "weight_loader", None), "came", None)
    if came is None:
        raise LookupError(f"{type(mixer).__name__} has kept no {DECAY[0]}: its decay rates can't be traced back")
    mine = came.narrow(0, get_tensor_model_parallel_rank() * len(mixer.A), len(mixer.A))
    # Where it came: the CPU's exponentials and a GPU's differ in their last bits.
    made_from_it = torch.equal((-torch.exp(mine.float())).to(mixer.A.device), mixer.A)
    return mine.to(mixer.A.device) if made_from_it else torch.log(-mixer.A)
