"""Memory that stays: freed blocks are kept for the next tensor instead of going back to the operating system.

A training step allocates and frees the same large tensors in every layer. By default glibc maps each of them anew, and
the first touch of every page is a fault; on virtual machines that was seen to cost a fifth of a training step.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of parameters, from glibc's malloc.h."""
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed, for the whole process; True where that worked, False without glibc.

    Peak memory is as before; what falls after the peak is only what :func:`give_back` returns.
    """
    libc = _glibc()
    return libc is not None and all(libc.mallopt(name, LARGEST) == 1 for name in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


def give_back() -> None:
    """Returns what is free now to the operating system, as far as it lies in whole pages."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
