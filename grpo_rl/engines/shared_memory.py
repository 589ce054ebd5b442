"""The format of a transfer through shared memory; the trainer's end is `grpo_rl.weights.shared_memory`."""

import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

MEMORY_NAME = "grpo_rl weights"
"""Name of the trainer's memory, which distinguishes it from other files."""
HEADER_WORDS = 2
"""Words of 64 bits in front of a bucket's tensors: the policy version, and the bucket's number."""


@contextmanager
def one_thread_less() -> Iterator[None]:
    """A context in which the calling thread's PyTorch leaves a core, if it has several, to the transfer's other end.

    Both ends work at the same time, and threads that wait for a core cost more than they save.
    """
    threads = torch.get_num_threads()
    # In its workers vLLM replaces `torch.set_num_threads` by a function that does nothing.
    torch._C.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch._C.set_num_threads(threads)


def trainers_memory(path: str, size: int) -> Tensor:
    """The bytes of a `grpo_rl.weights.shared_memory.SharedMemory`, mapped read-only.

    Raises:
        RuntimeError: what is under the path here is something else.
    """
    remedy = (
        "shared memory reaches processes of the trainer's own machine, container and user only; put the engine there, "
        "or send weights to its GPU with inference_model.transfer=ipc or nccl"
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


def handle_of(memory: Tensor) -> list[Any]:
    """The handle by which another process opens a GPU's memory (CUDA IPC), in types that every message can carry.

    What PyTorch makes of a tensor for another process has classes in it, which vLLM's messages refuse: behind the first
    seven entries come bytes, numbers and flags.
    """
    return list(cast("tuple[Any, tuple[Any, ...]]", reduce_tensor(memory))[1][7:])


def trainers_gpu_memory(handle: list[Any], size: int, device: torch.device) -> Tensor:
    """The bytes of a `grpo_rl.weights.shared_memory.GpuMemory`, which this process only reads.

    Raises:
        RuntimeError: the memory is another GPU's, or can't be opened here.
    """
    try:
        return rebuild_cuda_tensor(
            torch.Tensor, torch.Size([size]), (1,), 0, torch.UntypedStorage, torch.uint8, device.index, *handle
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"the trainer's memory can't be opened on {device} ({error}): ipc reaches processes on the trainer's own "
            "GPU, in its container; inference_model.transfer=shared_memory takes the way through the host"
        ) from error


@dataclass
class Part:
    """Consecutive values of a tensor, as one bucket holds them.

    Args:
        values: flat, in the memory.
        first: index of the first of them among all values of the tensor.
    """

    name: str
    shape: torch.Size
    first: int
    values: Tensor

    @property
    def is_last(self) -> bool:
        """True if this is the tensor's last part."""
        return self.first + len(self.values) == self.shape.numel()


def parts(memory: Tensor, entries: list[list[Any]]) -> Iterator[Part]:
    """The parts in a bucket: their values where they lie, without a copy.

    >>> memory = torch.tensor([0, 0, 128, 63], dtype=torch.uint8)
    >>> [part.values.tolist() for part in parts(memory, [["w", "bfloat16", [2, 1], 0, 0, 2]])]
    [[0.0, 1.0]]
    """
    for name, kind, shape, start, first, count in entries:
        dtype = getattr(torch, kind)
        yield Part(name, torch.Size(shape), first, memory[start : start + count * dtype.itemsize].view(dtype))
