"""The CPU allocator keeps freed memory for the next tensor instead of returning it to the operating system.

A training step allocates and frees the same large tensors in every layer. By default glibc maps each of them again,
and the first touch of every page is a fault, which is expensive on virtual machines (figures: docs/log.md).
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from glibc's malloc.h."""
LARGEST, LARGEST_BEFORE_2_35 = 2**31 - 1, 2**25


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory, for the whole process, until :func:`give_back` returns it.

    Returns:
        whether blocks of all sizes are kept: False without glibc, and before 2.35, which keeps up to 32 MiB.
    """
    libc = _glibc()
    if libc is None:
        return False
    libc.mallopt(M_TRIM_THRESHOLD, LARGEST)
    if libc.mallopt(M_MMAP_THRESHOLD, LARGEST) == 1:
        return True
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BEFORE_2_35)
    return False


def give_back() -> None:
    """Returns the free pages to the operating system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
