"""WeightSync: weights from the trainer to the engines, the proof that they arrived, and the policy version.

A :class:`Transport` brings them there. The two in this file are for an engine in this process, and for a rank without
an engine.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from grpo_rl.distributed.sharded_checkpoint import export_model
from grpo_rl.engines.base import ADAPTER_NAME, Engine
from grpo_rl.engines.fingerprint import batch_on, digest, fingerprint
from grpo_rl.policies.loading import CheckpointNames, whole
from grpo_rl.policies.lora import adapted_layers, base_weights, factors, has_adapters, merged, saved_buffers
from grpo_rl.waits import waiting

if TYPE_CHECKING:
    from grpo_rl.distributed.ranks import Ranks

R = TypeVar("R")


class WeightDeliveryError(RuntimeError):
    """An engine does not hold what was sent."""


@dataclass(frozen=True)
class Held:
    """An engine's report of what it holds: the version, and fingerprints of what it computes with, or digests."""

    version: int
    fingerprints: Mapping[str, int]


@runtime_checkable
class Transport(Protocol):
    """Sends weights to engines; `grpo_rl.weights.push.WeightSync` compares what they then hold with what was sent."""

    dtype: torch.dtype
    """Dtype of the weights that the engines hold."""

    takes_adapters: bool

    on_new_engine: Callable[[], None] | None
    """A function that the thread that trains calls when a new engine needs weights: it sends them."""

    def fingerprint(self, name: str, tensor: Tensor) -> SupportsInt:
        """The number that :meth:`send` reports for an engine that holds this tensor; it may be computed later."""

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """Sends the weights, read once, one after the other; what each engine holds then, by its name.

        Raises:
            EngineDeadError: an engine died, or did not answer within the deadline; names it.
            WeightDeliveryError: an engine refused its weights; with its name and reason.
        """

    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """Fingerprints (`grpo_rl.engines.fingerprint`) of the named tensors that engines compute with, read back."""

    def paused(self, only_new: bool = False) -> AbstractContextManager[bool]:
        """A context in which no engine samples. An error in it leaves them paused: what they hold is not proven.

        It yields whether some engine is new, and so also lacks the weights that never change; with ``only_new`` weights
        are sent to those engines alone.
        """


class InProcess(Transport):
    """An engine in this process, which is handed the tensors themselves."""

    on_new_engine: Callable[[], None] | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_new = engine, True
        self._proofs = PushProofs()
        self.dtype, self.takes_adapters = engine.dtype, engine.takes_adapters

    @override
    def fingerprint(self, name: str, tensor: Tensor) -> SupportsInt:
        # The first push is verified by reading the packed weights back, as `held` does.
        return self._proofs.number(name, tensor, self._engine.proves_bytes and not self._is_new)

    @override
    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        shapes: dict[str, torch.Size] = {}
        seen = noting_shapes(weights, shapes)
        self._engine.update_weights(seen, version)
        for _ in seen:
            pass  # an engine that stopped early lacks what is left
        return {"the engine": Held(self._engine.version, self._engine.fingerprints(shapes, self._is_new))}

    @override
    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        return {"the engine": Held(self._engine.version, self._engine.fingerprints(shapes, True))}

    @contextmanager
    def paused(self, only_new: bool = False) -> Iterator[bool]:
        """Pauses nothing: the engine samples when it is called. One that sleeps is woken."""
        self._engine.wake()
        self._proofs = PushProofs()
        try:
            yield self._is_new
            self._is_new = False
        finally:
            self._proofs = PushProofs()  # the last ones may hold tensors


class NullTransport:
    """Sends nothing, and takes part in gathering the sharded weights that rank zero sends to engines of this kind."""

    on_new_engine: Callable[[], None] | None = None

    def __init__(self, dtype: torch.dtype, takes_adapters: bool) -> None:
        self.dtype, self.takes_adapters = dtype, takes_adapters

    def fingerprint(self, name: str, tensor: Tensor) -> int:
        """Unused: this rank has nothing to compare with."""
        return 0

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """Takes part in gathering each tensor."""
        deque(weights, maxlen=0)
        return {}

    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """Empty: this rank has no engine."""
        return {}

    @contextmanager
    def paused(self, only_new: bool = False) -> Iterator[bool]:
        """Pauses nothing; rank zero decides what is sent."""
        yield False

    def close(self) -> None:
        """Frees nothing."""


def noting_shapes(weights: Iterable[tuple[str, Tensor]], shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """The weights as they are, whose shapes are put into ``shapes`` as they are taken."""
    for name, tensor in weights:
        shapes[name] = tensor.shape
        yield name, tensor
        del tensor  # before the next one is made


class PushProofs:
    """The numbers by which engines prove what they hold of one push; on a GPU computed later, many at a time."""

    def __init__(self) -> None:
        self._batch_on = functools.cache(batch_on)  # one batch a device and push, which it computes together

    def number(self, name: str, tensor: Tensor, by_bytes: bool) -> SupportsInt:
        """The tensor's fingerprint; ``by_bytes`` the digest of its bytes, except for an adapter's."""
        if by_bytes:
            return fingerprint(tensor) if ADAPTER_NAME.fullmatch(name) else digest(tensor)
        batch = self._batch_on(tensor.device)
        return batch.add(tensor) if batch else fingerprint(tensor)


class WeightSync:
    """Owns the policy version: each push sends the model's parameters to the engines under the next one, and is proven.

    Engines that join later are sent the present weights automatically. Sharded weights are gathered by all
    ranks, so the ranks that wait for rank zero do so in :meth:`on_rank_zero`, where they take part in such a delivery.

    A model with adapters is sent as the engine takes it: merged, a tensor at a time, or the adapters alone, next to a
    base that is sent with the first push. No second copy of the weights is made here; vLLM, which fuses some layers,
    holds the tensors of each until they are all there.

    Args:
        model: the trainer's model, whose weights are sent by the checkpoint's names, tied ones once.
        engine: the engine that samples; or a transport to engines in other processes, which it pauses during a push.
        version: policy version of the weights that the model has now.
        ranks: the processes that train the model together; all of them push, and rank zero has the engine.
    """

    def __init__(
        self, model: torch.nn.Module, engine: Engine | Transport, version: int = 0, ranks: Ranks | None = None
    ) -> None:
        self._model, self._ranks = model, ranks
        self._names = CheckpointNames(model)
        self._transport: Transport = engine if isinstance(engine, Transport) else InProcess(engine)
        self._transport.on_new_engine = self._deliver_to_new
        assert has_adapters(model) or not engine.takes_adapters, "the engine is made for adapters; the model has none"
        self._base: dict[str, int] | None = None
        self._listeners: list[Callable[[int], None]] = []
        self._version = version

    @property
    def version(self) -> int:
        """The policy version: of the weights that were pushed last."""
        return self._version

    def restore(self, version: int) -> None:
        """Goes back to a checkpoint of this version: the push that follows sends the weights under it again."""
        self._version = version - 1

    def subscribe(self, listener: Callable[[int], None]) -> None:
        """Has ``listener`` called with the new version after each push, once all engines hold it."""
        self._listeners.append(listener)

    def push(self) -> int:
        """Sends the weights under the next version, proves that they arrived, and returns that version.

        Raises:
            WeightDeliveryError: an engine computes with something else than what was sent.
            EngineDeadError: an engine died, or did not answer within the transport's deadline, and is not replaced.
        """
        self._version += 1
        with waiting("engines to take the weights", version=self._version):
            self._deliver()
        for listener in self._listeners:
            listener(self._version)
        return self._version

    def on_rank_zero(self, work: Callable[[], R]) -> R:
        """Does the work on rank zero and returns its result on every rank; others wait, and take part in deliveries."""
        if self._ranks is None:
            return work()
        if self._ranks.rank == 0:
            return self._ranks.broadcast(("result", work()))[1]
        while True:
            message: tuple[str, Any] = self._ranks.broadcast(("", None))
            if message[0] == "result":
                return message[1]
            self._deliver(only_new=True)

    def _deliver_to_new(self) -> None:
        """Sends the present weights to engines that hold none, in the course of rank zero's work."""
        if self._ranks:
            self._ranks.broadcast(("deliver", None))
        self._deliver(only_new=True)

    def _deliver(self, only_new: bool = False) -> None:
        sent: dict[str, tuple[torch.Size, SupportsInt]] = {}
        with self._transport.paused(only_new) as frozen:
            frozen = self._ranks.broadcast(frozen) if self._ranks else frozen
            weights = self._weights(frozen, sent, self._transport.fingerprint)
            self._check(sent, self._transport.send(weights, self._version))

    def _weights(
        self, frozen: bool, seen: dict[str, tuple[torch.Size, SupportsInt]], mark: Callable[[str, Tensor], SupportsInt]
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors to send; the shape of each that is taken, and its ``mark``, are put into ``seen``."""
        dtype, buffers, weights = self._transport.dtype, saved_buffers(self._model), merged_weights(self._model)
        if self._transport.takes_adapters:
            # The base that the trainer computes with, which differs from the model's folder if it is quantised.
            weights = chain(base_weights(self._model) if frozen else (), adapter_weights(self._model))
        for name, tensor in weights:
            # Of a sharded one every rank asks for all.
            tensor = tensor if name in buffers else whole(tensor.to(dtype))
            for its_name, part in self._names.views(name, tensor):
                seen[its_name] = part.shape, mark(its_name, part.to(dtype))
                yield its_name, part
                del part
            del tensor  # before the next one is made

    def verify(self) -> None:
        """Reads back all weights that the engines compute with, and compares them with the trainer's.

        A push trusts the digest that an engine recorded before repacking a weight; this reads the repacked weight.

        Raises:
            WeightDeliveryError: they differ; names the tensors.
        """
        expected: dict[str, tuple[torch.Size, SupportsInt]] = {}
        for _ in self._weights(True, expected, lambda _, tensor: fingerprint(tensor)):
            pass
        self._check(expected, self._transport.held({name: shape for name, (shape, _) in expected.items()}))

    def _check(self, sent: Mapping[str, tuple[torch.Size, SupportsInt]], engines: Mapping[str, Held]) -> None:
        """Verifies that engines hold this version and what was sent: the end of each push, and of :meth:`verify`."""
        for engine, held in engines.items():
            wrong = [name for name, (_, expected) in sent.items() if held.fingerprints.get(name) != int(expected)]
            if wrong or held.version != self._version:
                shown = ", ".join(wrong[:5]) + (", …" if len(wrong) > 5 else "")
                raise WeightDeliveryError(
                    f"weight version {self._version} did not arrive: {engine} holds version {held.version}, and "
                    f"{len(wrong)} of {len(sent)} tensors differ from what was sent ({shown or 'none'})."
                )

    def base_fingerprints(self) -> dict[str, int]:
        """Fingerprints of the weights under adapters, by name, as a checkpoint lacks them; empty without adapters."""
        if self._base is None:
            weights = base_weights(self._model) if has_adapters(self._model) else ()
            self._base = {name: fingerprint(whole(tensor)) for name, tensor in weights}
        return self._base

    def check_base(self, saved: Mapping[str, int]) -> None:
        """Refuses adapters that were trained on another base, by the :meth:`base_fingerprints` saved with them.

        Raises:
            ValueError: names the tensors.
        """
        ours = self.base_fingerprints()
        differ = [name for name in sorted(ours.keys() | saved.keys()) if ours.get(name) != saved.get(name)]
        if differ:
            raise ValueError(
                f"the checkpoint's adapters belong to another base: {len(differ)} of {len(ours)} tensors of the model "
                f"have changed since ({differ[0]}, …); put back its files. If it is quantised, resume on the same kind "
                "of device with the same bitsandbytes"
            )


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights under the base checkpoint's names, made one at a time, with what adapters add to them.

    Tied ones come once. The sum is made in fp32, and the model itself stays as it is. The engine rounds the sum to its
    dtype, in which small adapters may drown: what it samples from is then a little off what is trained.
    """
    layers = adapted_layers(model)
    for name, weight in base_weights(model):
        path, _, kind = name.rpartition(".")
        if kind == "weight" and path in layers:
            weight = merged(layers[path], weight)
        yield name, weight


def adapter_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters as ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``, the latter scaled."""
    for path, layer in adapted_layers(model).items():
        for part, factor in zip("AB", factors(layer), strict=True):
            yield f"{path}.lora_{part}.weight", factor


def export_merged(model: PreTrainedModel, folder: Path) -> None:
    """Writes a model with adapters as one without, in its own dtype: it is read without peft or bitsandbytes."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    buffers = saved_buffers(model)
    weights = merged_weights(model)
    sums = {name: weight.cpu() if name in buffers else weight.to("cpu", model.dtype) for name, weight in weights}
    export_model(sums, config, folder, model.dtype, model.generation_config)
