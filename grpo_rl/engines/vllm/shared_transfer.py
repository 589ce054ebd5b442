"""What vLLM's workers load weights with, when they come through memory shared with the trainer. For vLLM 0.32.

vLLM has transfers between GPUs (NCCL, CUDA IPC) and a registry for more. This is one for CPUs, registered as a plugin:
the entry point `vllm.general_plugins` calls :func:`register` in every process of vLLM's.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from grpo_rl.engines.base import ADAPTER_NAME, a_core_left

if TYPE_CHECKING:  # vLLM reads a plugin before its layers can be imported
    from grpo_rl.engines.vllm.cpu_direct import Places

BACKEND = "grpo_rl_shared_memory"
MEMORY_NAME = "grpo_rl weights"
"""Of the trainer's memory, by which it is told from other files; as `grpo_rl.weights.shared_memory` has it."""
HEADER = 2
"""Words of 64 bits in front of a bucket's tensors: the policy version, and the bucket's number."""


def register() -> None:
    """Makes the transfer known to vLLM under the name of :data:`BACKEND`; any number of times."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryEngine.__name__)


@dataclass
class NothingToAgreeOn(WeightTransferInitInfo):
    """Every bucket says where it is."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Tensors that lie in shared memory now.

    Args:
        path: of the memory, as this machine's processes open it.
        key: of the memory; another one may be found under the same path later.
        size: of all of it, in bytes.
        start: of the bucket's header in it.
        number: of the bucket, from 0 on in each update.
        version: policy version of the weights.
        tensors: of each tensor or part of one: name, dtype, shape, and first byte in the memory; which values they are,
            of all in a row: the first, and how many; and None, or the number of values that changed, where only those
            are there: their places as int32, then they. Parts of a tensor come one after the other.
        names: of all tensors of the update, given with its last bucket.
        keep: keep a copy of each, which later updates will send the changes of.
    """

    path: str
    key: str
    size: int
    start: int
    number: int
    version: int
    tensors: list[list[Any]]
    names: list[str] | None = None
    keep: bool = False


@dataclass
class Part:
    """A part of a tensor that came.

    Args:
        values: flat; in the memory, or kept.
        first: of all values of the tensor.
    """

    name: str
    shape: torch.Size
    first: int
    values: Tensor

    @property
    def is_last(self) -> bool:
        """Whether the tensor ends with it."""
        return self.first + len(self.values) == self.shape.numel()


@dataclass
class Coming:
    """A tensor of which a part has come, and is held until the rest is there."""

    values: Tensor
    hash: Any = field(default_factory=xxhash.xxh3_64)


class SharedMemoryEngine(WeightTransferEngine[NothingToAgreeOn, Bucket]):
    """Loads buckets in place, by one of two roads; what does not come stays as it was.

    vLLM's own road takes whole tensors, of any model, and loads a layer as soon as all of it is there. After an update
    that came by it, a worker on a CPU looks where each tensor went (`grpo_rl.engines.vllm.cpu_direct`). Where it finds
    all of them, later updates take the direct road: every part of a tensor is put there as it comes.
    """

    init_info_cls, update_info_cls = NothingToAgreeOn, Bucket
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._memory: tuple[str, Tensor] | None = None
        self._is_reloading = False
        self._reached: dict[str, tuple[int, int]] = {}  # of each tensor: how many values came, and of how many
        self._names: list[str] | None = None
        self._loaded: dict[str, tuple[torch.Size, int]] = {}
        self._places: Places | None = None
        self.version = 0
        """Of the update that came last."""
        self.adapter: dict[str, Tensor] = {}
        """What came of an adapter, to be held when the update is over."""
        self._kept: dict[str, Tensor] = {}
        self._coming: dict[str, Coming] = {}

    @property
    def is_direct(self) -> bool:
        """Whether the next update takes the direct road."""
        return self._places is not None and self._places.still_hold()

    def init_transfer_engine(self, init_info: NothingToAgreeOn) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Begins anew, whatever became of the update before."""
        self.abandon()
        self._reached, self._names, self._loaded, self.adapter = {}, None, {}, {}
        if not self.is_direct:
            self._places = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes a bucket in. vLLM's own waits for an accelerator afterwards, which a CPU has not."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.abandon()
            raise

    @torch.no_grad()
    def receive_weights(self, update_info: Bucket) -> None:
        """Loads a bucket's tensors, and checks that it is the one that was announced.

        Raises:
            RuntimeError: it is another, or a part of a tensor before it is missing.
        """
        memory = self._open(update_info)
        header = memory[update_info.start : update_info.start + 8 * HEADER].view(torch.int64).tolist()
        if header != [update_info.version, update_info.number]:
            raise RuntimeError(
                f"bucket {update_info.number} of version {update_info.version} was announced, and the shared memory "
                f"holds bucket {header[1]} of version {header[0]}"
            )
        if not update_info.keep:
            self._kept = {}
        weights = []
        with a_core_left():
            for part in _parts(memory, update_info.tensors, self._kept, update_info.keep):
                reached, _ = self._reached.get(part.name, (0, 0))
                if reached != part.first:
                    raise RuntimeError(f"values {reached} to {part.first} of {part.name} are missing")
                self._reached[part.name] = part.first + len(part.values), part.shape.numel()
                place = self._places and self._places.get(part.name)
                if place is not None:
                    place.write(part.first, part.values)
                elif (tensor := self._whole(part)) is not None:
                    weights.append((part.name, tensor))
            if weights:
                self._load(weights)
        self._names = update_info.names
        self.version = update_info.version

    def _whole(self, part: Part) -> Tensor | None:
        """The tensor that a part is the last or the only one of, unless it belongs to an adapter."""
        if part.first == 0:
            values = part.values if part.is_last else part.values.new_empty(part.shape.numel())
            self._coming[part.name] = Coming(values)
        coming = self._coming[part.name]
        coming.hash.update(part.values.view(torch.uint8).numpy())
        if coming.values is not part.values:
            coming.values[part.first : part.first + len(part.values)] = part.values
        if not part.is_last:
            return None
        del self._coming[part.name]
        tensor = coming.values.view(part.shape)
        if ADAPTER_NAME.fullmatch(part.name):
            self.adapter[part.name] = tensor.clone()
            return None
        self._loaded[part.name] = part.shape, coming.hash.intdigest()
        return tensor

    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self._is_reloading:
            initialize_layerwise_reload(self.model)
            self._is_reloading = True
        with disable_mtp_completeness_check():
            self.model.load_weights(weights)
        for _, _, info in self._waiting():
            for _, call in info.loaded_weights:
                # The trainer will write over it before the rest of the layer comes.
                call.arguments |= {
                    k: v.clone() for k, v in call.arguments.items() if isinstance(v, Tensor) and not v.is_meta
                }

    def _waiting(self) -> Iterator[tuple[str, torch.nn.Module, Any]]:
        """Layers of which a part has come."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for path, layer in self.model.named_modules():
            info = LAYERWISE_INFO.get(layer)
            if info is not None and info.loaded_weights:
                yield path, layer, info

    def finish_weight_update(self) -> None:
        """Puts together what has come.

        Raises:
            RuntimeError: tensors are missing, or were written for the first time and can't be read back; names them.
        """
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        from grpo_rl.engines.vllm.cpu import refresh_heads
        from grpo_rl.engines.vllm.engine import find_places

        if self._names is None:
            self.abandon()
            raise RuntimeError(f"version {self.version} did not come whole: its last bucket is missing")
        missing = [name for name in self._names if name not in self._reached]
        missing += [f"{name} from value {came} on" for name, (came, size) in self._reached.items() if came < size]
        # vLLM would fill up a layer that lacks a part with whatever is in memory there.
        missing = missing or [
            f"a part of {path}" for path, layer, _ in self._waiting() if isinstance(layer, LinearBase)
        ]
        if missing:
            self.abandon()
            raise RuntimeError(
                f"version {self.version} did not come whole: {len(missing)} of {len(self._names)} tensors are "
                f"missing ({_some(missing)})"
            )
        if self._places and (wrong := self._places.written_wrong(self._reached)):
            self._places = None
            self.abandon()
            raise RuntimeError(
                f"of version {self.version} {len(wrong)} tensors were written by the direct road and are not where "
                f"they were put ({_some(wrong)}); later updates take vLLM's own"
            )
        if self._is_reloading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._is_reloading = False
            refresh_heads(self.model)
            self._places = find_places(self.model, self._loaded)

    def abandon(self) -> None:
        """Gives up an update: what has come is new, or new in part, all else what it was."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        from grpo_rl.engines.vllm.cpu import refresh_heads

        self._coming = {}
        if self._is_reloading:
            for _, _, info in self._waiting():
                info.loaded_weights.clear()
                info.load_numel = 0
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_heads(self.model)
        self._is_reloading = False

    def _open(self, bucket: Bucket) -> Tensor:
        if self._memory is None or self._memory[0] != bucket.key:
            self._memory = None  # before another is mapped
            self._memory = bucket.key, trainers_memory(bucket.path, bucket.size)
        return self._memory[1]

    def shutdown(self) -> None:
        """Lets go of the memory."""
        self._memory = None


def trainers_memory(path: str, size: int) -> Tensor:
    """The bytes of a `grpo_rl.weights.shared_memory.SharedMemory`, to be read and never written.

    Raises:
        RuntimeError: what is under the path here is something else.
    """
    remedy = (
        "shared memory reaches processes of the trainer's own machine, container and user only; put the engine there, "
        "or send weights between GPUs with nccl"
    )
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise RuntimeError(f"the trainer's memory {path} can't be opened ({error.strerror}): {remedy}") from error
    try:
        found, its_size = os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size
        if not found.startswith(f"/memfd:{MEMORY_NAME}") or its_size != size:
            raise RuntimeError(
                f"under {path} there is {found} of {its_size} bytes, and not the trainer's memory of {size}: {remedy}"
            )
        mapped = mmap.mmap(file, size, access=mmap.ACCESS_READ)
    finally:
        os.close(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor is it written
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _parts(memory: Tensor, entries: list[list[Any]], kept: dict[str, Tensor], keep: bool) -> Iterator[Part]:
    """What came with a bucket: where it lies, without a copy; where changes came, what they make of what was kept.

    Args:
        kept: of each tensor that came, a copy, which changes are put into; taken where ``keep`` is set.

    >>> memory = torch.tensor([0, 0, 128, 63, 1, 0, 0, 0, 0, 64], dtype=torch.uint8)
    >>> kept = {}
    >>> [part.values.tolist() for part in _parts(memory, [["w", "bfloat16", [2, 1], 0, 0, 2, None]], kept, True)]
    [[0.0, 1.0]]
    >>> [part.values.tolist() for part in _parts(memory, [["w", "bfloat16", [2, 1], 4, 0, 2, 1]], kept, True)]
    [[0.0, 2.0]]
    """
    for name, kind, shape, start, first, count, changed in entries:
        dtype = getattr(torch, kind)
        if changed is None:
            values = memory[start : start + count * dtype.itemsize].view(dtype)
            if keep and first == 0:
                kept[name] = torch.empty(math.prod(shape), dtype=dtype)
            if keep:
                kept[name][first : first + count] = values
        else:
            places, new = memory[start:].split([4 * changed, len(memory) - start - 4 * changed])
            kept[name][places.view(torch.int32).long()] = new[: changed * dtype.itemsize].view(dtype)
            values = kept[name][first : first + count]
        if count or not math.prod(shape):
            yield Part(name, torch.Size(shape), first, values)
