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
    a page costs more than many copies of it. Large pages where the system has them. What is larger than a slab has a mapping of its
    own, which ends with its owner: between slabs of many sizes much would lie idle."""

    def __init__(self) -> None:
        self._slabs: list[tuple[mmap.mmap, int]] = []
        self.clear()

    def clear(self) -> None:
        self._slab, self._used = 0, 0

    def piece(self, nbytes: int) -> tuple[mmap.mmap, int, int]:
        """The slab that a piece lies in, its offset there, its address."""
        if nbytes > _SLAB:
            slab, address = _mapped(nbytes)
            return slab, 0, address
        if self._used + nbytes > _SLAB:
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._slabs.append(_mapped(_SLAB))
        slab, address = self._slabs[self._slab]
        place, self._used = self._used, self._used + -(-nbytes // ALIGNED) * ALIGNED
        return slab, place, address + place


def _mapped(nbytes: int) -> tuple[mmap.mmap, int]:
    slab = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        slab.madvise(mmap.MADV_HUGEPAGE)
    return slab, ctypes.addressof(ctypes.c_char.from_buffer(slab))
