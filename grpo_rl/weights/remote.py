"""RemoteTransport: calls to engines in other processes, all at once, under one deadline; what failed is named.

NativeTransport, one of them, is vLLM's transfer between GPUs by NCCL; it has not been run yet.
"""

import importlib
import itertools
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, Protocol, SupportsInt

import torch
from torch import Tensor
from typing_extensions import override

from grpo_rl.engines.base import EngineDeadError
from grpo_rl.waits import waiting
from grpo_rl.weights.push import Held, PushProofs, Transport, WeightDeliveryError, noting_shapes

READ_AT_ONCE = 16
"""Tensors that an engine reads back in one call, while it samples nothing."""


class EngineControl(Protocol):
    """An engine in another process or on another event loop, as a trainer calls it."""

    name: str
    dtype: torch.dtype
    takes_adapters: bool
    proves_bytes: bool
    """True if it proves weights by digests instead of fingerprints; adapters are always proven by fingerprints."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Calls one of :class:`grpo_rl.engines.vllm.asynchronous.AsyncVLLMEngine`'s methods."""


class RemoteTransport(Transport):
    """Base of the transports to other processes: calls to all engines at once, under one deadline.

    Args:
        engines: all of one dtype, with or without adapters.
        deadline_s: seconds that each call may take.
    """

    def __init__(self, engines: Sequence[EngineControl], deadline_s: float = 60.0) -> None:
        kinds = {(engine.dtype, engine.takes_adapters, engine.proves_bytes) for engine in engines}
        assert len(kinds) == 1, f"weights go to engines of one kind; these are {len(engines)} of {kinds}"
        ((self.dtype, self.takes_adapters, self.proves_bytes),) = kinds
        self.engines: list[EngineControl] = list(engines)
        self.deadline_s = deadline_s
        self.on_new_engine: Callable[[], None] | None = None
        self.on_lost: Callable[[EngineControl, EngineDeadError], None] | None = None
        """A function of an engine that died; without it that is an error. The others get the weights all the same."""
        self._served: list[EngineControl] = []
        self._proofs = PushProofs()
        self._gone: set[str] = set()

    @override
    def fingerprint(self, name: str, tensor: Tensor) -> SupportsInt:
        return self._proofs.number(name, tensor, self.proves_bytes)

    def submit(self, method: str, *args: Any) -> dict[str, Future[Any]]:
        """Starts a call to each engine; the pending calls, by the engines' names."""
        return {engine.name: engine.submit(method, *args) for engine in self.engines}

    def wait(self, calls: Mapping[str, Future[Any]], what: str) -> dict[str, Any]:
        """Waits for the calls and returns their results, by the engines' names; engines that are lost have none.

        Raises:
            EngineDeadError: an engine died, or did not answer within the deadline.
            WeightDeliveryError: an engine refused.
        """
        end = time.monotonic() + self.deadline_s
        results: dict[str, Any] = {}
        with waiting("engines", what, self.deadline_s) as shown:
            while open_calls := {name: calls[name] for name in calls if name not in results and name not in self._gone}:
                shown.what = ", ".join(itertools.islice(open_calls, 3))
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
        """Submits a call to each engine, and waits: :meth:`submit`, then :meth:`wait`."""
        return self.wait(self.submit(method, *args), what)

    @override
    @abstractmethod
    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]: ...

    def said(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        """Fingerprints that each engine reports of the weights it has loaded; faster than reading all of them back."""
        plain = {name: list(shape) for name, shape in shapes.items()}
        return self._with_versions(self.call("fingerprints", plain, what="the proof of delivery"))

    @override
    def held(self, shapes: Mapping[str, torch.Size]) -> dict[str, Held]:
        # A few tensors a call, so that each call is a short one.
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

    @override
    @contextmanager
    def paused(self, only_new: bool = False) -> Iterator[bool]:
        everyone, self._gone, self._proofs = self.engines, set(), PushProofs()
        self.engines = [engine for engine in everyone if not only_new or engine not in self._served]
        try:
            self.call("pause", what="a pause for new weights")
            yield any(engine not in self._served for engine in self.engines)
            self.call("resume", what="going on with new weights")
            self._served = [engine for engine in everyone if engine in self._served or engine in self.engines]
        finally:
            self._proofs = PushProofs()  # the last ones may hold tensors
            self.engines = [engine for engine in everyone if engine.name not in self._gone]
            self._served = [engine for engine in self._served if engine in self.engines]

    @abstractmethod
    def close(self) -> None:
        """Frees the transport's resources."""

    def abandon(self) -> None:
        """Gives up an update on the engines that still answer."""
        calls = self.submit("abandon_weight_update")
        wait(calls.values(), timeout=min(self.deadline_s, 5.0))

    # What vLLM's own trainers call; see vllm.distributed.weight_transfer.base.VLLMWeightSyncClient.

    def start_weight_update(self) -> None:
        """Begins an update."""
        self.call("start_weight_update", what="the start of an update")

    def update_weights(self, update_info: Any) -> None:
        """Has the engines take in a part of the weights."""
        self.call("update_weights", update_info, what="a part of an update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends an update."""
        self.call("finish_weight_update", weight_version, what="the end of an update")


class NativeTransport(RemoteTransport):
    """vLLM's own transfer between GPUs: NCCL, within a machine and between machines.

    Not run yet: it was written from vLLM 0.32's interface on a machine without a GPU.

    Args:
        engines: the engines to send to, built with ``transfer="nccl"``.
        shapes: shapes of all tensors (the model's named parameters), in the order in which they are sent.
        gpus_per_engine: number of GPUs of each engine.
        address: address at which engines on other machines reach this one.
        device: the GPU that sends; None: the current device.
    """

    def __init__(
        self,
        engines: Sequence[EngineControl],
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
        self._gpus, self._address = gpus_per_engine, address
        self._version = 0
        self._trainer: Any = None
        self._connected: list[EngineControl] = []

    @override
    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        # A lost engine is an error even where engines are replaced: the broadcast cannot go on without a member.
        shapes: dict[str, torch.Size] = {}
        self._source.weights = noting_shapes(weights, shapes)
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
        if self._connected == self.engines:
            return
        if self._trainer:
            self._trainer.shutdown()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        world = 1 + self._gpus * len(self.engines)
        settings = {"master_address": self._address, "master_port": port, "world_size": world}
        self._trainer = self._transfer.native_trainer(self, self._source, settings)
        self._connected = list(self.engines)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects each engine under the ranks of its own GPUs; the trainer is rank zero."""
        calls = {}
        for i, engine in enumerate(self.engines):
            own = {"rank_offset": 1 + i * self._gpus}
            calls[engine.name] = engine.submit("init_weight_transfer_engine", init_info | own)
        self.wait(calls, "connecting")

    def _send_into(self, sent: Future[None]) -> None:
        try:
            if self._device:
                torch.cuda.set_device(self._device)  # new threads default to device 0
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
