"""Transports of weights to engines: the interface, and those to an engine in this process and of a rank without one."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, SupportsInt, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from grpo_rl.engines.base import ADAPTER_NAME, Engine
from grpo_rl.engines.fingerprint import batch_on, digest, fingerprint


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
        """Fingerprints (`grpo_rl.engines.fingerprint`) of the named tensors that each engine computes with, read back.

        Raises:
            EngineDeadError: as :meth:`send`.
        """

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
