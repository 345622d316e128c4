"""Host memory between and within rows, where the device is emulated and every tensor lies in it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_KEPT: Final = -1
"""More than any size, as mallopt reads it: nothing is trimmed by itself."""
_STEP: Final = 2**26


def hold() -> Callable[[], object]:
    """Lets glibc keep what is freed, for the next tensor of the same row; returns what gives it back to the system, to be called
    between rows. By itself glibc maps large blocks and unmaps them when they are freed, and each time the system clears their pages
    anew: that was a third of MobileSAM's row. With another C library nothing is changed. (Source: mallopt(3), malloc_trim(3).)"""
    library = ctypes.CDLL(None)
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is None or trim is None:
        return lambda: None
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _STEP)):
        mallopt(option, value)
    return lambda: trim(0)
