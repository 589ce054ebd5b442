"""Weights through memory that a trainer and engines share: written once, bucket by bucket, and loaded from there.

The memory is the host's or, where both compute on the same GPU, that GPU's (CUDA IPC). vLLM has an ``ipc`` transfer of
its own, whose handles are pickled: its engines in processes of their own refuse that, unless all messages may be.

The engines' end is `grpo_rl.engines.vllm.shared_transfer`, a weight transfer in vLLM's registry.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from grpo_rl.engines.shared_memory import MEMORY_NAME, handle_of, one_thread_less
from grpo_rl.weights.push import Held
from grpo_rl.weights.remote import EngineControl, RemoteTransport

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line."""
HEADER_BYTES = 16
GPU_BYTES = 256 << 20
"""Size of the memory on a GPU that the trainer and an engine share."""
ROWS = 64
"""A tensor is cut after a multiple of this many rows, which engines on CPUs pack at once."""


class SharedMemoryTransport(RemoteTransport):
    """Writes weights into shared memory, bucket by bucket, while the engines load the bucket before.

    The memory has no name in the file system: it is gone with the last process that has it open, however that ends.

    Args:
        engines: in processes of this machine and user, built with ``transfer`` set to ``shared_memory``, or to ``ipc``
            where there is a device.
        bucket_bytes: of the memory, which holds two buckets, one being written and one being read; it grows where two
            rows of a tensor do not fit. No more of the model than this is ever held to be sent. Where it fits into the
            processor's cache, what is sent does not pass through main memory.
        deadline_s: seconds that each call may take.
        device: the GPU whose memory is shared, the engines' and the weights' own; None: the memory is the host's.
    """

    def __init__(
        self,
        engines: Sequence[EngineControl],
        bucket_bytes: int = 16 << 20,
        deadline_s: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(engines, deadline_s)
        self._device = device
        self.sent_bytes = 0
        """Bytes of the tensors in the last push."""
        self._memory = self._new_memory(bucket_bytes)
        self._under_way: list[tuple[int, dict[str, Future[Any]], str] | None] = [None, None]

    @override
    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Held]:
        shapes: dict[str, torch.Size] = {}
        self.sent_bytes = 0
        self.start_weight_update()
        try:
            with one_thread_less():
                self._send_buckets(weights, version, shapes)
            self.finish_weight_update(str(version))
        except BaseException:
            self._under_way = [None, None]
            self.abandon()
            raise
        return self.said(shapes)

    def _send_buckets(self, weights: Iterable[tuple[str, Tensor]], version: int, shapes: dict[str, torch.Size]) -> None:
        number, end, entries = 0, HEADER_BYTES, []
        for name, tensor in weights:
            shapes[name] = tensor.shape
            kind = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            columns = max(1, tensor.shape[-1]) if tensor.ndim > 1 else 1
            flat = tensor.detach().contiguous().view(-1)
            row_bytes, left = columns * flat.element_size(), len(flat) // columns
            while True:
                fit = min(left, max(0, self._memory.half - end) // row_bytes)
                if left and not fit:
                    if entries:
                        self._send_bucket(number, version, entries)
                        number, end, entries = number + 1, HEADER_BYTES, []
                    else:
                        self._grow(HEADER_BYTES + row_bytes)
                    continue
                if ROWS < fit < left:
                    fit -= fit % ROWS
                self._ready(number)
                start, first = self._memory.start(number) + end, len(flat) - left * columns
                part = flat[first : first + fit * columns]
                entries.append([name, *kind, start, first, len(part)])
                self._memory.write(start, part)
                self.sent_bytes += part.nbytes
                end, left = _aligned(end + part.nbytes), left - fit
                if not left:
                    break
            del tensor, flat, part  # before the next one is made
        self._send_bucket(number, version, entries, list(shapes))
        self._drain()

    def _grow(self, half: int) -> None:
        self._drain()
        self._memory.close()
        self._memory = self._new_memory(2 * _aligned(half + ALIGNMENT))

    def _new_memory(self, size: int) -> Memory:
        return GpuMemory(size, self._device) if self._device else SharedMemory(size)

    def _send_bucket(self, number: int, version: int, entries: list[list[Any]], names: list[str] | None = None) -> None:
        """Has the engines load a bucket; returns before they have."""
        self._ready(number)
        self._memory.write(self._memory.start(number), torch.tensor([version, number]))
        self._memory.settle()
        bucket = {
            "handle": self._memory.handle,
            "path": self._memory.path,
            "key": self._memory.key,
            "size": self._memory.size,
            "start": self._memory.start(number),
            "number": number,
            "version": version,
            "tensors": entries,
            "names": names,
        }
        first = entries[0][0] if entries else "nothing"
        calls = self.submit("update_weights", bucket)
        self._under_way[number % 2] = number, calls, f"bucket {number} of version {version}, {first} …"

    def _ready(self, number: int) -> None:
        """Waits until the engines are done with what a bucket will be written over."""
        if under_way := self._under_way[number % 2]:
            self._under_way[number % 2] = None
            self.wait(*under_way[1:])

    def _drain(self) -> None:
        # The older one first: where it failed, the other's error is only that the update is over.
        for number in sorted(under_way[0] for under_way in self._under_way if under_way):
            self._ready(number)

    def close(self) -> None:
        """Frees the memory."""
        self._memory.close()


class Memory:
    """Memory of ``size`` bytes in two halves, which engines open by a path or a handle."""

    path = ""
    handle: list[Any] | None = None
    _bytes: Tensor

    def __init__(self, size: int) -> None:
        self.half = _aligned(size // 2)
        self.size = 2 * self.half
        self.key = uuid.uuid4().hex

    def start(self, number: int) -> int:
        """The offset of the half in which a bucket of this number lies."""
        return number % 2 * self.half

    def write(self, start: int, tensor: Tensor) -> None:
        """Copies a tensor's bytes, from whatever device."""
        self._bytes[start : start + tensor.nbytes].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))

    def settle(self) -> None:
        """Returns when all that was written can be read."""
        # Copies into the host's memory are over when they return; another process does not wait for this one's stream.
        if self._bytes.device.type == "cuda":
            torch.cuda.current_stream(self._bytes.device).synchronize()

    def close(self) -> None:
        """Frees it; engines that have it mapped keep it until they map another or end."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


class SharedMemory(Memory):
    """The host's memory, which processes of the same user open by a path.

    All of it is allocated at once, so it counts towards the memory cgroup of the process that creates it.

    >>> memory = SharedMemory(1 << 12)
    >>> memory.write(memory.start(1), torch.tensor([1.0, 2.0]))
    >>> theirs = torch.from_file(memory.path, shared=True, size=memory.size, dtype=torch.uint8)
    >>> theirs[memory.half:memory.half + 8].view(torch.float32).tolist()
    [1.0, 2.0]
    >>> memory.close()
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._file: int | None = os.memfd_create(MEMORY_NAME)
        # Taken now, as a lack of memory would otherwise show as a fatal signal in the middle of a write.
        os.posix_fallocate(self._file, 0, self.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._bytes = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)

    @override
    def close(self) -> None:
        if self._file is not None:
            super().close()
            os.close(self._file)
            self._file = None


class GpuMemory(Memory):
    """A GPU's memory, which processes on the same GPU open by a handle."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size)
        self._bytes = torch.empty(self.size, dtype=torch.uint8, device=device)
        # PyTorch counts who opens it. An engine that died has not given it back: the memory then stays until this
        # process ends, as it would have anyway.
        self.handle = handle_of(self._bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
