"""Memory that was freed stays with the process: fetched anew, every page of it costs a fault."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's names for its settings (malloc.h)."""
LARGEST_BLOCK = 2**25
"""Larger ones still go back at once; glibc allows no more."""


def keep_freed_memory() -> None:
    """From now on, for the whole process, with glibc; other libraries have habits of their own."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
