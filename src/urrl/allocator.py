"""Memory that a training frees stays with the process.

glibc gives large blocks back to the kernel as they are freed and gets them again, page by page, at the next step: on a
CPU a fifth of a step of two views of the lean net (benchmarks/methods.py).
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST = 2**30


def keep_memory() -> None:
    """For a process of our own: it holds for all that runs there. Nothing happens where there is no glibc."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            if mallopt:
                mallopt(option, LARGEST)
