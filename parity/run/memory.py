"""Host memory between and within rows, where the device is emulated and every tensor lies in it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_KEPT: Final = -1
"""More than any size, as mallopt reads it: nothing is trimmed by itself."""
_STEP: Final = 2**26


def hold(share: int | None = None) -> Callable[[], object]:
    """Lets glibc keep what is freed, for the next tensor of the same row; returns what gives it back to the system, to be called
    between rows, and does nothing while the process has no more than ``share`` bytes (None: ``fair_share``). By itself glibc maps large
    blocks and unmaps them when they are freed, and each time the system clears their pages anew: that was a third of MobileSAM's row.
    With another C library nothing is changed. (Source: mallopt(3), malloc_trim(3).)"""
    library = ctypes.CDLL(None)
    mallopt, trim = getattr(library, "mallopt", None), getattr(library, "malloc_trim", None)
    if mallopt is None or trim is None:
        return lambda: None
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _STEP)):
        mallopt(option, value)
    limit = fair_share() if share is None else share
    return lambda: trim(0) if resident() > limit else None


def fair_share() -> int:
    """Bytes that a process may keep between rows: processes as many as processors keep half of the memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * (os.cpu_count() or 1))


def resident() -> int:
    """Bytes of memory that this process has. (Source: proc_pid_statm(5).)"""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
