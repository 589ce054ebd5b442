"""Engines of this process, as a trainer calls engines of others: real ones, and one that only loads weights."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from grpo_rl.engines.fingerprint import fingerprint
from grpo_rl.engines.loop_thread import AsyncEngine, LoopThread
from grpo_rl.weights.remote import EngineControl


class LoopControl(EngineControl):
    def __init__(self, engine: AsyncEngine, loop: LoopThread) -> None:
        self._engine, self._loop = engine, loop
        self.name, self.dtype = engine.name, engine.dtype
        self.takes_adapters, self.proves_bytes = engine.takes_adapters, engine.proves_bytes

    @override
    def submit(self, method: str, *args: Any) -> Future[Any]:
        return self._loop.start(getattr(self._engine, method)(*args))


@contextmanager
def served(engine: AsyncEngine) -> Iterator[LoopControl]:
    """The engine on an event loop in a thread, as a trainer has it; closed at the end."""
    loop = LoopThread()
    control = LoopControl(engine, loop)
    try:
        yield control
    finally:
        control.submit("close").result(60)
        loop.close()


class Reads(EngineControl):
    """Loads from shared memory as vLLM's workers do; its methods are called at once."""

    dtype, max_model_len, takes_adapters, proves_bytes = torch.bfloat16, 64, False, False

    def __init__(self, name: str = "engine 0") -> None:
        self.name, self.version, self.calls, self.largest = name, 0, [], 0
        self.weights: dict[str, torch.Tensor] = {}

    def begin(self, method: str) -> None:
        """Takes note of a call, which fails where this does."""
        self.calls.append(method)

    @override
    def submit(self, method: str, *args: Any) -> Future[Any]:
        call: Future[Any] = Future()
        try:
            self.begin(method)
            call.set_result(getattr(self, method)(*args))
        except Exception as error:
            call.set_exception(error)
        return call

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def start_weight_update(self) -> None: ...
    def abandon_weight_update(self) -> None: ...

    def update_weights(self, bucket: dict[str, Any]) -> None:
        memory = torch.from_file(bucket["path"], shared=True, size=bucket["size"], dtype=torch.uint8)
        self.largest = max(self.largest, bucket["size"])
        for name, dtype, shape, start, first, count in bucket["tensors"]:
            values = memory[start : start + 2 * count].view(getattr(torch, dtype))
            if first == 0:
                self.weights[name] = torch.zeros(shape, dtype=values.dtype)
            self.weights[name].view(-1)[first : first + count] = values

    def finish_weight_update(self, version: str) -> None:
        self.version = int(version)

    def weight_version(self) -> int:
        return self.version

    def fingerprints(self, shapes: dict[str, Any], read_back: bool = False) -> dict[str, int]:
        return {name: fingerprint(self.weights[name]) for name in shapes}
