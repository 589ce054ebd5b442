"""The CPU allocator keeps freed memory for the next tensor instead of returning it to the operating system.

A training step allocates and frees the same large tensors in every layer. By default glibc maps each of them again,
and the first touch of every page is a fault, which is expensive on virtual machines (figures: docs/log.md).
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST = -1, -3, 2**31 - 1
"""Parameters of mallopt, from glibc's malloc.h, and the largest value of either."""


def keep_freed_memory() -> None:
    """Makes glibc (2.35 or newer) keep freed memory, for the whole process, until :func:`give_back` returns it."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_TRIM_THRESHOLD, LARGEST)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST)


def give_back() -> None:
    """Returns the free pages to the operating system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
