"""The workers' end of a weight transfer through memory that is shared with the trainer. For vLLM 0.32.

vLLM has transfers between GPUs and a registry for more. This is one for CPUs, and for a trainer on the engine's own
GPU, registered as a plugin: the entry point `vllm.general_plugins` calls :func:`register` in every process of vLLM's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from grpo_rl.engines.base import ADAPTER_NAME
from grpo_rl.engines.shared_memory import (
    HEADER_WORDS,
    Part,
    one_thread_less,
    parts,
    trainers_gpu_memory,
    trainers_memory,
)

BACKEND = "grpo_rl_shared_memory"


def register() -> None:
    """Registers the transfer with vLLM as :data:`BACKEND`; may be called any number of times."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryEngine.__name__)


@dataclass
class NothingToAgreeOn(WeightTransferInitInfo):
    """An empty handshake: every bucket carries its own location."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Tensors that lie in shared memory now.

    Args:
        path: of the memory, as this machine's processes open it; empty where it is a GPU's.
        key: of the memory; another one may be found under the same path later.
        size: of all of it, in bytes.
        start: of the bucket's header in it.
        number: of the bucket, from 0 on in each update.
        tensors: of each tensor or part of one: name, dtype, shape, and first byte in the memory; which values they are,
            of all in a row: the first, and how many. Parts of a tensor come one after the other.
        names: of all tensors of the update, given with its last bucket.
        handle: of a GPU's memory, see `grpo_rl.engines.shared_memory.handle_of`.
    """

    path: str
    key: str
    size: int
    start: int
    number: int
    version: int
    tensors: list[list[Any]]
    names: list[str] | None = None
    handle: list[Any] | None = None


class SharedMemoryEngine(WeightTransferEngine[NothingToAgreeOn, Bucket]):
    """Loads each layer in place as soon as all of its tensors are there; what does not come stays as it was."""

    init_info_cls, update_info_cls = NothingToAgreeOn, Bucket
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._memory: tuple[str, Tensor] | None = None
        self._is_reloading = False
        self._reached: dict[str, tuple[int, int]] = {}  # tensor -> how many of its values came, and of how many
        self._names: list[str] | None = None
        self.version = 0
        """Policy version of the update that came last."""
        self.adapter: dict[str, Tensor] = {}
        """Factors of an adapter that came; the worker takes them over when the update has ended."""
        self._incomplete: dict[str, Tensor] = {}  # tensors of which a part has come
        self._in_place = False  # once vLLM has loaded weights into a model that computes with them as they are

    def init_transfer_engine(self, init_info: NothingToAgreeOn) -> None:
        """Does nothing: there is nothing to connect to."""

    def start_weight_update(self) -> None:
        """Begins anew, whatever became of the update before."""
        self.abandon()
        self._reached, self._names, self.adapter = {}, None, {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes a bucket in; once this returns, the trainer writes over it."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
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
        header = memory[update_info.start : update_info.start + 8 * HEADER_WORDS].view(torch.int64).tolist()
        if header != [update_info.version, update_info.number]:
            raise RuntimeError(
                f"bucket {update_info.number} of version {update_info.version} was announced, and the shared memory "
                f"holds bucket {header[1]} of version {header[0]}"
            )
        weights = []
        with one_thread_less():
            for part in parts(memory, update_info.tensors):
                reached, _ = self._reached.get(part.name, (0, 0))
                if reached != part.first:
                    raise RuntimeError(f"values {reached} to {part.first} of {part.name} are missing")
                self._reached[part.name] = part.first + len(part.values), part.shape.numel()
                tensor = self._completed(part)
                if tensor is not None and ADAPTER_NAME.fullmatch(part.name):
                    self.adapter[part.name] = tensor.clone()
                elif tensor is not None:
                    weights.append((part.name, tensor))
            if weights:
                self._load(weights)
        self._names = update_info.names
        self.version = update_info.version

    def _completed(self, part: Part) -> Tensor | None:
        """The tensor that a part is the last or the only one of."""
        if part.first == 0 and part.is_last:
            return part.values.view(part.shape)
        if part.first == 0:
            self._incomplete[part.name] = part.values.new_empty(part.shape.numel())
        self._incomplete[part.name][part.first : part.first + len(part.values)] = part.values
        return self._incomplete.pop(part.name).view(part.shape) if part.is_last else None

    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        from grpo_rl.engines.vllm.held import write_in_place

        if self._in_place:
            write_in_place(self.model, weights)
            return
        if not self._is_reloading:
            initialize_layerwise_reload(self.model)
            self._is_reloading = True
        with disable_mtp_completeness_check():
            self.model.load_weights(weights)  # pyrefly: ignore[not-callable]
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
        """Ends the update, if all of it has come.

        Raises:
            RuntimeError: tensors are missing; names them.
        """
        from vllm.model_executor.layers.linear import LinearBase

        from grpo_rl.engines.vllm.held import is_plain

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
                f"version {self.version} did not come whole: {len(missing)} of {len(self._names)} tensors are missing "
                f"({', '.join(missing[:5])}{', …' if len(missing) > 5 else ''})"
            )
        loaded = self._is_reloading
        self._finish_reload()
        # An adapter's update may have loaded none of them.
        self._in_place = self._in_place or (self.device.type == "cuda" and loaded and is_plain(self.model))

    def abandon(self) -> None:
        """Gives up an update: what has come is new, or new in part, all else what it was."""
        self._incomplete = {}
        if self._is_reloading:
            for _, _, info in self._waiting():
                info.loaded_weights.clear()
                info.load_numel = 0
        self._finish_reload()

    def _finish_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        from grpo_rl.engines.vllm.cpu import refresh_heads
        from grpo_rl.engines.vllm.own_forms import refresh_convolutions

        if self._is_reloading:
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_heads(self.model)
            refresh_convolutions(self.model)
        self._is_reloading = False

    def _open(self, bucket: Bucket) -> Tensor:
        if self._memory is None or self._memory[0] != bucket.key:
            self._memory = None  # before another is mapped
            if bucket.handle is None:
                self._memory = bucket.key, trainers_memory(bucket.path, bucket.size)
            else:
                self._memory = bucket.key, trainers_gpu_memory(bucket.handle, bucket.size, self.device)
        return self._memory[1]

    def shutdown(self) -> None:
        """Unmaps the memory."""
        self._memory = None
