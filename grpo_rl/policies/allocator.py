"""Memory that stays: freed blocks are kept for the next tensor instead of going back to the operating system.

A training step allocates and frees the same large tensors in every layer. By default glibc maps each of them anew, and
the first touch of every page is a fault, which virtual machines make expensive (figures: docs/log.md).
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of parameters, from glibc's malloc.h."""
LARGEST, LARGEST_BEFORE_2_35 = 2**31 - 1, 2**25


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed, for the whole process: what falls is only what :func:`give_back` returns.

    Returns:
        whether that worked: False without glibc, and where it keeps only blocks of up to 32 MiB, as before 2.35.
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
    """Returns what is free now to the operating system, as far as it lies in whole pages."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
