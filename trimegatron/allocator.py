"""Freed memory stays with a training process on a CPU.

glibc gives freed memory back to the system, what is above 32 MB always, and the system fills it with zeros again, page
by page, when the next step asks for as much: 38,000 page faults in a step of 2,048 tokens and 8,192 words, a twelfth
of its time. The next step needs that memory anyway, so nothing is won by giving it back.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # mallopt(3)


def keep_freed_memory() -> bool:
    """Have C's allocator keep what is freed, for this process and its children. Whether it does: it is glibc's, and
    the environment does not set it up (``MALLOC_…``, ``GLIBC_TUNABLES``), which has the last word."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, AttributeError):  # another C library
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # All from the heap, and no end of it is cut off.
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
