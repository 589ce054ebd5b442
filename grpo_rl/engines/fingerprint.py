"""Fingerprints of weights, computed where the weights are, whole or in shards.

A weight is a matrix X of 16-bit words; its fingerprint is ``a^T X b`` modulo 2^64 with fixed pseudo-random odd ``a``
(by row, 64 bits) and ``b`` (by column, two sets of 20 bits). A change of any single word always shows, since odd
numbers are invertible; other changes go unseen with a chance of about 2^-40. Being bilinear, it adds up over row and
column shards, which a cryptographic hash would not: an engine that fuses or splits matrices can still prove what it
holds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from grpo_rl.engines.fingerprint_triton import TritonBatch

_MASK = (1 << 64) - 1
_MAX_WORDS = 1 << 18
"""Columns at most: words below 2^15 times multipliers below 2^20 then sum to less than 2^53, exact in fp64."""
_CHUNK = 1 << 19  # words at a time: the fp64 copy stays in a CPU's cache
_JOIN = -7046029254386353131  # odd; separates the two sets of column sums


def fingerprint(tensor: Tensor, row_start: int = 0, column_start: int = 0) -> int:
    """Fingerprint of the tensor's bits, 0 … 2^64 - 1.

    Args:
        tensor: at least 16 bits an element; a vector is a column, more than two dimensions are rows x the last one.
        row_start: first row that this shard holds of the whole.
        column_start: first column likewise.

    Raises:
        ValueError: elements of 8 bits, or a row longer than 2^18 words.

    Shards add up:

    >>> x = torch.arange(12.0).reshape(4, 3)
    >>> whole = fingerprint(x)
    >>> whole == add(fingerprint(x[:1]), fingerprint(x[1:], row_start=1))
    True
    >>> whole == fingerprint(x.roll(1, dims=0))
    False
    """
    if tensor.element_size() < 2:
        raise ValueError(f"fingerprints need 16-bit elements or wider, not {tensor.dtype}")
    if tensor.element_size() < 8 and (batch := batch_on(tensor.device)):
        return int(batch.add(tensor, row_start, column_start))
    words_per_element = tensor.element_size() // 2
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    rows, columns = matrix.shape[0], matrix.shape[1] * words_per_element
    if columns > _MAX_WORDS:
        raise ValueError(f"a row of {columns} words is longer than {_MAX_WORDS}")
    a, b = _multipliers(row_start, rows, column_start * words_per_element, columns, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = max(1, _CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        # Adding zero turns -0.0 into 0.0: the two compute the same, and a GEMM that reads weights back loses the sign.
        words = (matrix[start : start + step] + 0).contiguous().view(torch.int16)
        sums = linear(words.double(), b).long()
        # int64 arithmetic wraps modulo 2^64, which is what we want.
        total += ((sums[:, 0] + sums[:, 1] * _JOIN) * a[start : start + step]).sum()
    return int(total) & _MASK


def batch_on(device: torch.device | str) -> TritonBatch | None:
    """A batch of fingerprints, computed on the device in few kernels; None where only one at a time can be.

    Triton may be there and fail: it builds its launchers with a C compiler and Python's headers.

    >>> batch_on("cpu") is None
    True
    """
    if torch.device(device).type != "cuda":
        return None
    from grpo_rl.engines import fingerprint_triton  # Triton takes long to import, and no CPU needs it

    return fingerprint_triton.TritonBatch() if fingerprint_triton.works_on(device) else None


def digest(tensor: Tensor) -> int:
    """Hash of a tensor's bytes (XXH3, https://xxhash.com), 0 … 2^64 - 1, as fast as memory is read.

    Both ends of a transfer compute it where one process holds each tensor whole; fingerprints of shards add up.

    >>> x = torch.arange(12.0)
    >>> digest(x) == digest(x.reshape(3, 4)) != digest(x.flip(0))
    True
    """
    return xxhash.xxh3_64_intdigest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def add(*fingerprints: int) -> int:
    """Fingerprint of the whole from those of its shards."""
    return sum(fingerprints) & _MASK


@lru_cache(maxsize=256)
def _multipliers(row: int, rows: int, column: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers of the rows, [rows] int64 and odd, and of the columns, [2, columns] fp64, odd and even.

    Joined by an odd factor, a column's pair is odd again, hence invertible. In this layout products with them are
    faster on a CPU (docs/log.md).
    """
    b = _odd(column + (1 << 40), columns, device)
    return _odd(row, rows, device), torch.stack([b & 0xFFFFF, (b >> 32) & 0xFFFFE]).double()


def _odd(start: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers from the splitmix64 sequence, https://prng.di.unimi.it/splitmix64.c, in int64."""
    x = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * _JOIN
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _logical_shift(x, shift)) * factor
    return (x ^ _logical_shift(x, 31)) | 1


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
