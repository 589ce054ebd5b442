"""Weights in the form that vLLM's CPU kernels multiply by, written in place. For vLLM 0.32, with oneDNN 3.13.

vLLM packs a weight into memory that oneDNN allocates, and offers no way to pack new values into it: every reload packs
into new memory, and oneDNN takes as long for it as for three to five copies. Here that memory is found and written.
Where it lies follows from how vLLM and oneDNN lay out their objects, which no interface promises. So it is looked for
in a way that can't crash, and nobody writes before `grpo_rl.engines.vllm.cpu_direct.Places` has found there, bit by
bit, what vLLM packed. Where it does not, vLLM's own way is taken.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LANES = 64
"""Rows of a weight that lie side by side; oneDNN calls the form BA16a64b2a, for 16-bit weights."""
_PAD = 16
_WEIGHTS = 33
"""oneDNN's DNNL_ARG_WEIGHTS."""
# Offsets in bytes: of a handler's map of memories, its list's first node; of a oneDNN memory, its storages; of a
# storage, its data.
_MEMORIES, _STORAGES, _DATA = 64, 792, 48
_MOST_MEMORIES = 32


@dataclass(frozen=True)
class Packed:
    """A weight of N rows as [N / LANES, words, LANES] int32: a word is two 16-bit values of a row, or one of 32 bits.

    Args:
        blocks: rows and words are padded with zeros.
        words: of a row.
        owner: of the memory, kept as long as this is.

    Raises:
        ValueError: the blocks are laid out otherwise.
    """

    blocks: Tensor
    words: int
    owner: Any

    def __post_init__(self) -> None:
        _, padded, lanes = self.blocks.shape
        if not (_is_plain(self.blocks) and lanes == LANES and self.words <= padded):
            raise ValueError(f"blocks of {self.words} words are {list(self.blocks.shape)} {self.blocks.dtype}")

    def write(self, row: int, values: Tensor) -> None:
        """Packs rows in the place of those from ``row`` on.

        Args:
            values: [n, words] int32, contiguous, on the CPU.

        Raises:
            ValueError: they are something else, or there are no such rows.
        """
        last = row + len(values)
        if not _is_plain(values) or values.shape[1:] != (self.words,):
            raise ValueError(
                f"rows to be packed are [n, {self.words}] int32, contiguous, on the CPU; these are "
                f"{list(values.shape)} {values.dtype} with strides {values.stride()} on {values.device}"
            )
        if not 0 <= row <= last <= LANES * len(self.blocks):
            raise ValueError(f"rows {row} to {last} of {LANES * len(self.blocks)}")
        transpose, source = _transpose(), values.data_ptr()
        while row < last:
            block, lane = divmod(row, LANES)
            count = min(LANES - lane, last - row)
            there = self.blocks.data_ptr() + 4 * (block * self.blocks.stride(0) + lane)
            transpose(count, self.words, source, self.words, there, LANES)
            row, source = row + count, source + 4 * count * self.words

    def read(self, row: int, count: int) -> Tensor:
        """Rows as they were before packing, [count, words] int32, contiguous."""
        first, last = row // LANES, -(-(row + count) // LANES)
        rows = self.blocks[first:last, : self.words].transpose(1, 2).reshape(-1, self.words)
        return rows[row - LANES * first :][:count].contiguous()  # of a single block it is a view still


def _is_plain(words: Tensor) -> bool:
    return words.dtype == torch.int32 and words.is_contiguous() and words.device.type == "cpu"


@functools.cache
def _transpose() -> Callable[[int, int, int, int, int, int], None]:
    """FBGEMM's ``transpose_simd``, which is a part of PyTorch on x86: rows, columns, from, its stride, to, its stride.

    PyTorch calls it for `channel_shuffle` alone, which has no way to write into memory that is there already.

    Raises:
        LookupError: this PyTorch has none, or another.
    """
    name = "_ZN6fbgemm14transpose_simdIfEEvllPKT_lPS1_l"  # of 32-bit words, all sizes of 64 bits
    try:
        transpose = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))[name]
    except (OSError, AttributeError) as error:
        raise LookupError(f"PyTorch {torch.__version__} has no {name}") from error
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    transpose.argtypes, transpose.restype = [size, size, pointer, size, pointer, size], None
    return transpose


def handler_of(linear: Callable[..., Tensor]) -> Any:
    """What vLLM's ``cpu_linear`` multiplies with: oneDNN's handler, or None where it multiplies by the plain weight.

    Raises:
        LookupError: it is another of vLLM's kernels.
    """
    held = dict(zip(linear.__code__.co_freevars, linear.__closure__ or (), strict=True)) if _is_python(linear) else {}
    if not held:
        return None
    if set(held) != {"handler"}:
        raise LookupError(f"vLLM multiplies with a kernel that holds {', '.join(sorted(held))}")
    return held["handler"].cell_contents


def packed_weight(handler: Any, element_size: int) -> Packed:
    """Where a handler keeps its packed weight, as far as can be seen from outside.

    Args:
        handler: vLLM's, of a oneDNN product.
        element_size: of the weight, 2 or 4 bytes.

    Raises:
        LookupError: it is not found; or this PyTorch lacks what packs into it.
    """
    _transpose()  # or the lack of it would show in the middle of an update
    rows, words = handler.n, handler.k * element_size // 4
    shape = (-(-rows // LANES), -(-words // _PAD) * _PAD, LANES)
    size = 4 * shape[0] * shape[1] * shape[2]
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            address = _data_of_weights(memory, handler.handler_tensor.item())
            readable = len(os.pread(memory, size, address)) == size
        finally:
            os.close(memory)
    except (OSError, OverflowError, struct.error) as error:
        raise LookupError(f"oneDNN's memory of a weight of {rows} rows is not where it was looked for") from error
    if not readable or address % 64 or handler.k * element_size % 4:
        raise LookupError(f"oneDNN's memory of a weight of {rows} rows is not where it was looked for")
    theirs = (ctypes.c_char * size).from_address(address)
    return Packed(torch.frombuffer(theirs, dtype=torch.int32).view(shape), words, handler)


def is_where_it_was(packed: Packed) -> bool:
    """Whether its handler still keeps its weight there."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            return _data_of_weights(memory, packed.owner.handler_tensor.item()) == packed.blocks.data_ptr()
        finally:
            os.close(memory)
    except (LookupError, OSError, OverflowError, struct.error):
        return False


def _data_of_weights(memory: int, handler: int) -> int:
    def read(kind: str, address: int) -> int:
        return struct.unpack(kind, os.pread(memory, struct.calcsize(kind), address))[0]

    node = read("<Q", handler + _MEMORIES)
    for _ in range(_MOST_MEMORIES):
        if read("<i", node + 8) == _WEIGHTS:
            return read("<Q", read("<Q", read("<Q", read("<Q", node + 16) + _STORAGES)) + _DATA)
        node = read("<Q", node)
    raise LookupError("oneDNN's handler has no weight")


def _is_python(function: Callable[..., Tensor]) -> bool:
    return hasattr(function, "__code__")
