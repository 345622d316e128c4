"""Memory for what is remembered."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

ALIGNED: Final = 64
"""Bytes; kernels pick vector code by it."""
_SLAB: Final = 2**26  # bytes


class Arena:
    """Memory that is given out piece by piece and taken back all at once, for the next owner: on a virtual machine the first touch of
    a page costs more than many copies of it. Large pages where the system has them."""

    def __init__(self) -> None:
        self._slabs: list[tuple[mmap.mmap, int]] = []
        self.clear()

    def clear(self) -> None:
        self._slab, self._used = 0, 0

    def piece(self, nbytes: int) -> tuple[mmap.mmap, int, int]:
        """The slab that a piece lies in, its offset there, its address."""
        while self._slab < len(self._slabs) and self._used + nbytes > len(self._slabs[self._slab][0]):
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            slab = mmap.mmap(-1, max(_SLAB, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
            if hasattr(mmap, "MADV_HUGEPAGE"):
                slab.madvise(mmap.MADV_HUGEPAGE)
            self._slabs.append((slab, ctypes.addressof(ctypes.c_char.from_buffer(slab))))
        slab, address = self._slabs[self._slab]
        place, self._used = self._used, self._used + -(-nbytes // ALIGNED) * ALIGNED
        return slab, place, address + place
