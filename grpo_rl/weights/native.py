"""NativeTransport: vLLM's own weight transfer between GPUs."""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from grpo_rl.weights.remote import EngineControl, RemoteTransport
from grpo_rl.weights.transport import Held, noting_shapes


class NativeTransport(RemoteTransport):
    """vLLM's own transfer between GPUs: NCCL, within a machine and between machines.

    Not run yet: it was written from vLLM 0.32's interface on a machine without a GPU.

    Args:
        engines: the engines to send to, built with ``transfer="nccl"``.
        shapes: shapes of all tensors (the model's named parameters), in the order in which they are sent.
        deadline_s: seconds that each call may take, and the transfer.
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
        """Connects with the engines of this push, unless they are those of the last one."""
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
