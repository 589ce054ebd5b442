"""Fingerprints of many tensors on CUDA in few kernels and one copy to the host, equal to those of `fingerprint`.

All arithmetic is modulo 2^64, so the order of the sums is free. Triton's interpreter runs the same kernel on CPU
tensors, where ``TRITON_INTERPRET=1`` is set before Triton is imported.
Letters: n tensors, p programs; R rows and C columns of a program's tile, in words of 16 bits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from grpo_rl.policies.head_triton import jit, tl, triton

log = logging.getLogger(__name__)

TILE_ROWS, TILE_COLUMNS = 16, 256
FIELDS = 8
"""Numbers that describe a tensor to the kernel."""


class Piece(NamedTuple):
    """A tensor, and where its first row and column are in the whole that it is a shard of."""

    tensor: Tensor
    row_start: int = 0
    column_start: int = 0


HELD_BYTES = 1 << 29
"""Bytes of tensors that a batch holds before it launches a kernel for them: some are temporary."""


class TritonBatch:
    """Fingerprints that are computed later, many at a time; all tensors are on one device."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._bytes = 0
        self._launched: list[Tensor] = []
        self._numbers: list[int] = []

    def add(self, tensor: Tensor, row_start: int = 0, column_start: int = 0) -> PendingFingerprint:
        """The fingerprint of a tensor that stays as it is until ``int`` of it is asked for."""
        number = sum(map(len, self._launched)) + len(self._numbers) + len(self._pieces)
        self._pieces.append(Piece(tensor, row_start, column_start))
        self._bytes += tensor.nbytes
        if self._bytes > HELD_BYTES:
            self._launch()
        return PendingFingerprint(self, number)

    def _launch(self) -> None:
        if self._pieces:
            self._launched.append(sums_of(self._pieces))
        self._pieces, self._bytes = [], 0

    def numbers(self) -> list[int]:
        """All fingerprints so far; one copy to the host for those that are not there yet."""
        self._launch()
        if self._launched:
            self._numbers += [number % (1 << 64) for number in torch.cat(self._launched).tolist()]
            self._launched = []
        return self._numbers


class PendingFingerprint(NamedTuple):
    """A fingerprint of a batch, computed when its number is asked for."""

    batch: TritonBatch
    number: int

    def __int__(self) -> int:
        return self.batch.numbers()[self.number]


@functools.cache
def works_on(device: torch.device | str) -> bool:
    """True if the kernel is there, is built and runs, by one number's fingerprint."""
    if triton is None:
        return False
    try:
        int(TritonBatch().add(torch.ones(1, dtype=torch.float16, device=device)))
    except Exception as error:  # compilers fail in many ways
        log.warning("Fingerprints are computed one at a time, which takes longer: Triton failed: %.300s", error)
        return False
    return True


def sums_of(pieces: Sequence[Piece]) -> Tensor:
    """The fingerprint of each piece as a signed number, [n], on the pieces' device."""
    # By name: a copy must outlive the launch.
    held = [piece._replace(tensor=piece.tensor.detach().contiguous()) for piece in pieces]
    device = held[0].tensor.device
    tiles, table = _tiles(tuple(_described(*piece) for piece in held), device)
    sums = torch.zeros(len(held), dtype=torch.int64, device=device)
    with torch.cuda.device_of(sums):
        _add_tiles[(len(tiles),)](tiles, table, sums, TILE_ROWS, TILE_COLUMNS, FIELDS)
    return sums


def _described(tensor: Tensor, row_start: int, column_start: int) -> tuple[int, ...]:
    if tensor.element_size() not in (2, 4):
        raise ValueError(f"fingerprints need elements of 16 or 32 bits, not {tensor.dtype}")
    words = tensor.element_size() // 2
    columns = (tensor.shape[-1] if tensor.ndim > 1 else 1) * words
    rows = tensor.numel() * words // columns if columns else 0
    across = -(-columns // TILE_COLUMNS)
    tiles = -(-rows // TILE_ROWS) * across
    return tensor.data_ptr(), words, rows, columns, row_start, column_start * words, across, tiles


@functools.lru_cache(maxsize=8)  # weights stay where they are: the description crosses to the device once
def _tiles(described: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tensor and the tile that each program reads, [p, 2], and the description of the tensors, [n, FIELDS]."""
    counts = torch.tensor([fields[-1] for fields in described])
    index = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]
    return torch.stack([index, within], 1).to(device), torch.tensor(described).to(device)


# Triton reads a kernel's source: `no_type_check` keeps the tests' run-time type checks from wrapping it.
@jit
@no_type_check
def _odd(index):
    """Odd numbers from the splitmix64 sequence, as `grpo_rl.engines.fingerprint._odd`."""
    x = ((index + 1) * -7046029254386353131).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * tl.full((), -4658895280553007687, tl.int64).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 27)) * tl.full((), -7723592293110705685, tl.int64).to(tl.uint64, bitcast=True)
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True) | 1


@jit
@no_type_check
def _add_tiles(tiles, table, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    tensor, tile = tl.load(tiles + 2 * program), tl.load(tiles + 2 * program + 1)
    fields = table + tensor * FIELDS
    address, words = tl.load(fields).to(tl.pointer_type(tl.int16)), tl.load(fields + 1)
    rows, columns = tl.load(fields + 2), tl.load(fields + 3)
    row_start, column_start, across = tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6)
    row = (tile // across) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    word = tl.load(address + place, mask=inside, other=0).to(tl.int32)
    # -0.0 counts as 0.0. Of an element of 32 bits both words say whether it is one.
    if words == 1:
        zero = word == -32768
    else:
        is_high = (column % 2 == 1)[None, :]
        other = tl.load(address + tl.where(is_high, place - 1, place + 1), mask=inside, other=0).to(tl.int32)
        zero = tl.where(is_high, (word == -32768) & (other == 0), (word == 0) & (other == -32768))
    word = tl.where(zero, 0, word).to(tl.int64)
    a = _odd(row_start + row)
    b = _odd(column_start + column + 1099511627776)
    pair = (b & 0xFFFFF) + ((b >> 32) & 0xFFFFE) * -7046029254386353131
    of_rows = tl.sum(word * pair[None, :], 1)
    tl.atomic_add(sums + tensor, tl.sum(of_rows * a, 0))
