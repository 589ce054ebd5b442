"""The format of a transfer through shared memory; the trainer's end is `grpo_rl.weights.shared_memory`."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MEMORY_NAME = "grpo_rl weights"
"""Name of the trainer's memory, which tells it from other files."""
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
        """Tells whether this is the tensor's last part."""
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
