"""How weights get to engines in other processes: one interface, deadlines, and names for what failed."""

from __future__ import annotations

import asyncio
import importlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from grpo_rl.engines.base import ADAPTER_NAME, AsyncEngine, Engine, EngineDeadError
from grpo_rl.engines.fingerprint import digest, fingerprint

READ_AT_ONCE = 16
"""Tensors that an engine is asked to read back in one call, while it samples nothing."""


class WeightDeliveryError(RuntimeError):
    """An engine does not hold what was sent."""


@dataclass(frozen=True)
class Held:
    """What an engine says that it holds: the version, and fingerprints of what it computes with, or digests."""

    version: int
    fingerprints: Mapping[str, int]


@runtime_checkable
class Transport(Protocol):
    """Sends weights to engines; `grpo_rl.weights.push.WeightSync` compares what they then hold with what was sent."""

    dtype: torch.dtype
    """Of the weights that the engines hold."""

    takes_adapters: bool

    on_new_engine: Callable[[], None] | None
    """Is called, by the thread that trains, where an engine joins that holds no weights: it sends them."""

    def fingerprint(self, name: str, tensor: Tensor) -> int:
        """What :meth:`send` says of an engine that holds this tensor."""
        ...

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """Sends the weights, read once, one after the other; what each engine holds then, by its name.

        Raises:
            EngineDeadError: an engine died, or did not answer within the deadline; names it.
            WeightDeliveryError: an engine refused what came; says which and why.
        """
        ...

    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """Fingerprints (`grpo_rl.engines.fingerprint`) of the named tensors that each engine computes with, read back.

        Raises:
            EngineDeadError: as :meth:`send`.
        """
        ...

    def paused(self, only_new: bool = False) -> AbstractContextManager[bool]:
        """A context in which no engine samples. An error in it leaves them paused: what they hold is not proven.

        It says whether some engine is new: it has been sent nothing yet, and lacks what does not change.

        Args:
            only_new: weights are sent to those engines alone.
        """
        ...


class InProcess:
    """An engine in this process, which is handed the tensors themselves."""

    on_new_engine: Callable[[], None] | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_new = engine, True
        self.dtype, self.takes_adapters = engine.dtype, engine.takes_adapters

    def fingerprint(self, name: str, tensor: Tensor) -> int:
        """See :meth:`Transport.fingerprint`; the first push is read back by products, as :meth:`held` does."""
        return _expected(name, tensor, self._engine.proves_bytes and not self._is_new)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """See :meth:`Transport.send`."""
        shapes: dict[str, torch.Size] = {}
        seen = _noting_shapes(weights, shapes)
        self._engine.update_weights(seen, version)
        for _ in seen:
            pass  # an engine that stopped early lacks what is left
        return {"the engine": Held(self._engine.version, self._engine.fingerprints(shapes, self._is_new))}

    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """See :meth:`Transport.held`."""
        return {"the engine": Held(self._engine.version, self._engine.fingerprints(shapes, True))}

    @contextmanager
    def paused(self, only_new: bool = False) -> Iterator[bool]:
        """Pauses nothing: the engine samples when it is called. One that sleeps is woken."""
        self._engine.wake()
        yield self._is_new
        self._is_new = False


class EngineControl(Protocol):
    """An engine in another process or event loop, as a trainer speaks to it; over Ray, a handle's ``.remote``."""

    name: str
    dtype: torch.dtype
    takes_adapters: bool
    proves_bytes: bool
    """Whether it answers with digests in the place of fingerprints, but for adapters."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Calls one of :class:`grpo_rl.engines.vllm.asynchronous.AsyncVLLMEngine`'s methods."""
        ...


class LoopControl:
    """An engine on an event loop that runs in another thread of this process."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self.name, self.dtype = engine.name, engine.dtype
        self.takes_adapters, self.proves_bytes = engine.takes_adapters, engine.proves_bytes

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """See :meth:`EngineControl.submit`."""
        return asyncio.run_coroutine_threadsafe(getattr(self._engine, method)(*args), self._loop)


class Controlled(ABC):
    """What transports to other processes share: calls to all engines at once, under one deadline.

    Args:
        engines: all of one dtype, with or without adapters.
        deadline_s: seconds that each call may take.

    Raises:
        ValueError: there are none, or they differ.
    """

    def __init__(self, engines: Sequence[EngineControl], deadline_s: float = 60.0) -> None:
        kinds = {(engine.dtype, engine.takes_adapters, engine.proves_bytes) for engine in engines}
        if len(kinds) != 1:
            raise ValueError(f"weights go to one or more engines of one kind; these are {len(engines)} of {kinds}")
        ((self.dtype, self.takes_adapters, self.proves_bytes),) = kinds
        self.engines: list[EngineControl] = list(engines)
        self.deadline_s = deadline_s
        self.on_new_engine: Callable[[], None] | None = None
        self.on_lost: Callable[[EngineControl, EngineDeadError], None] | None = None
        """Is told of an engine that died, in the place of an error: the others get what is sent all the same."""
        self._served: list[EngineControl] = []
        self._gone: set[str] = set()

    def fingerprint(self, name: str, tensor: Tensor) -> int:
        """See :meth:`Transport.fingerprint`."""
        return _expected(name, tensor, self.proves_bytes)

    def submit(self, method: str, *args: Any) -> dict[str, Future[Any]]:
        """The calls, under way, by the engines' names."""
        return {engine.name: engine.submit(method, *args) for engine in self.engines}

    def wait(self, calls: Mapping[str, Future[Any]], what: str) -> dict[str, Any]:
        """What the calls return, by the engines' names; engines that are lost have none.

        Raises:
            EngineDeadError: an engine died, or did not answer within the deadline.
            WeightDeliveryError: an engine refused.
        """
        end = time.monotonic() + self.deadline_s
        results: dict[str, Any] = {}
        while open_calls := {name: calls[name] for name in calls if name not in results and name not in self._gone}:
            done, late = wait(open_calls.values(), max(0.0, end - time.monotonic()), FIRST_COMPLETED)
            for name, call in open_calls.items():
                error = call.exception() if call in done else None
                if call in late and not done:
                    call.cancel()
                    self._lost(name, f"{name} did not answer within {self.deadline_s:g} s ({what})")
                elif isinstance(error, EngineDeadError):
                    self._lost(name, f"{error} ({what})")
                elif error is not None:
                    raise WeightDeliveryError(f"{name} failed at {what}: {error}") from error
                elif call in done:
                    results[name] = call.result()
        return results

    def _lost(self, name: str, why: str) -> None:
        error = EngineDeadError(why)
        engine = next((engine for engine in self.engines if engine.name == name), None)
        if self.on_lost is None or engine is None:
            raise error
        self._gone.add(name)
        self.engines.remove(engine)
        self.on_lost(engine, error)

    def call(self, method: str, *args: Any, what: str) -> dict[str, Any]:
        """What :meth:`wait` returns of :meth:`submit`'s calls."""
        return self.wait(self.submit(method, *args), what)

    @abstractmethod
    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """See :meth:`Transport.send`."""

    def said(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """What each engine says that it has put into place, which takes less time than to read all of it back."""
        plain = {name: list(shape) for name, shape in shapes.items()}
        return self._with_versions(self.call("fingerprints", plain, what="the proof of delivery"))

    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """See :meth:`Transport.held`; a few tensors a call, so that each call is a short one."""
        plain = [(name, list(shape)) for name, shape in shapes.items()]
        prints: dict[str, dict[str, int]] = {engine.name: {} for engine in self.engines}
        for first in range(0, len(plain), READ_AT_ONCE):
            some = dict(plain[first : first + READ_AT_ONCE])
            for name, part in self.call("fingerprints", some, True, what="reading weights back").items():
                prints[name] |= part
        return self._with_versions(prints)

    def _with_versions(self, prints: Mapping[str, Mapping[str, int]]) -> dict[str, Held]:
        versions = self.call("weight_version", what="the proof of delivery")
        return {name: Held(versions[name], prints[name]) for name in prints.keys() & versions.keys()}

    @contextmanager
    def paused(self, only_new: bool = False) -> Iterator[bool]:
        """See :meth:`Transport.paused`."""
        everyone, self._gone = self.engines, set()
        self.engines = [engine for engine in everyone if not only_new or engine not in self._served]
        try:
            self.call("pause", what="a pause for new weights")
            yield any(engine not in self._served for engine in self.engines)
            self.call("resume", what="going on with new weights")
            self._served = [engine for engine in everyone if engine in self._served or engine in self.engines]
        finally:
            self.engines = [engine for engine in everyone if engine.name not in self._gone]
            self._served = [engine for engine in self._served if engine in self.engines]

    @abstractmethod
    def close(self) -> None:
        """Lets go of what it has taken."""

    def abandon(self) -> None:
        """Gives up an update, as far as engines still answer."""
        calls = self.submit("abandon_weight_update")
        wait(calls.values(), timeout=min(self.deadline_s, 5.0))

    # What vLLM's own trainers call; see vllm.distributed.weight_transfer.base.VLLMWeightSyncClient.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects the engines with the trainer."""
        self.call("init_weight_transfer_engine", init_info, what="connecting")

    def start_weight_update(self) -> None:
        """Begins an update."""
        self.call("start_weight_update", what="the begin of an update")

    def update_weights(self, update_info: Any) -> None:
        """Has the engines take in a part of the weights."""
        self.call("update_weights", update_info, what="a part of an update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends an update."""
        self.call("finish_weight_update", weight_version, what="the end of an update")


class NativeTransport(Controlled):
    """vLLM's own transfers between GPUs: NCCL between machines, CUDA IPC within one.

    Not run yet: it was written from vLLM 0.32's interface on a machine without a GPU.

    Args:
        engines: built with ``transfer`` set to the same backend.
        backend: ``nccl``, or ``ipc`` where an engine is on this process's own GPU.
        shapes: of all tensors, in the order in which they are sent; those of the model's named parameters.
        deadline_s: seconds that each call may take, and the transfer.
        gpus_per_engine: of ``nccl``.
        address: of this machine, where engines on others reach it.
        device: the GPU that sends; None: the present one.
    """

    def __init__(
        self,
        engines: Sequence[EngineControl],
        backend: str,
        shapes: Mapping[str, torch.Size],
        deadline_s: float = 60.0,
        gpus_per_engine: int = 1,
        address: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(engines, deadline_s)
        self._device = device
        self._transfer = importlib.import_module("grpo_rl.engines.vllm.native_transfer")
        self._source = self._transfer.OneStream(shapes, self.dtype)
        self._backend, self._gpus, self._address = backend, gpus_per_engine, address
        self._version = 0
        self._trainer: Any = None
        self._connected: list[EngineControl] = []

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        """See :meth:`Transport.send`.

        Raises:
            EngineDeadError: also where somebody replaces engines: the broadcast of which one is a part ends with it.
        """
        shapes: dict[str, torch.Size] = {}
        self._source.weights = _noting_shapes(weights, shapes)
        self._version = version
        if not self.engines:
            for _ in self._source.weights:
                pass  # of a sharded model every rank takes part in gathering them
            return {}
        # A broadcast to an engine that is gone never returns, and can't be interrupted: it is left behind.
        sent: Future[None] = Future()
        threading.Thread(target=self._send_into, args=(sent,), daemon=True).start()
        self.wait({"the trainer": sent}, f"sending version {version}")
        return self.said(shapes)

    def _connect(self) -> None:
        """Connects with the engines of this push, where they are others than those of the last one."""
        if self._connected == self.engines:
            return
        if self._trainer:
            self._trainer.shutdown()
        settings: dict[str, Any] = {}
        if self._backend == "nccl":
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            world = 1 + self._gpus * len(self.engines)
            settings = {"master_address": self._address, "master_port": port, "world_size": world}
        self._trainer = self._transfer.native_trainer(self._backend, self, self._source, settings)
        self._connected = list(self.engines)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects each engine under the numbers of its own GPUs, behind the trainer's 0."""
        calls = {}
        for i, engine in enumerate(self.engines):
            own = {"rank_offset": 1 + i * self._gpus} if "rank_offset" in init_info else {}
            calls[engine.name] = engine.submit("init_weight_transfer_engine", init_info | own)
        self.wait(calls, "connecting")

    def _send_into(self, sent: Future[None]) -> None:
        try:
            if self._device:
                torch.cuda.set_device(self._device)  # a thread begins with the first
            self._connect()
            self._trainer.send_weights()
            sent.set_result(None)
        except BaseException as error:
            sent.set_exception(error)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends an update under the version that is being sent, which vLLM's trainers do not know."""
        super().finish_weight_update(weight_version or str(self._version))

    def close(self) -> None:
        """Ends the connection."""
        if self._trainer:
            self._trainer.shutdown()


def _expected(name: str, tensor: Tensor, proves_bytes: bool) -> int:
    """Digest or fingerprint of a tensor, whichever an engine that holds it gives."""
    return digest(tensor) if proves_bytes and not ADAPTER_NAME.fullmatch(name) else fingerprint(tensor)


def _noting_shapes(
    weights: Iterable[tuple[str, Tensor]], shapes: dict[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        shapes[name] = tensor.shape
        yield name, tensor
        del tensor  # before the next one is made
