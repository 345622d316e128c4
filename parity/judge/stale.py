"""Memory that a graph reads after its owner is gone, proved without guessing and without harm.

The address is looked up in the allocator's records. Unmapped: stale, and not touched. Owned by somebody else now, or free: what stands
there is saved, overwritten, the graph is replayed, and it is put back.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.runtime.engine import Engine
from parity.runtime.liveness import Read

SIGNAL = 0xFF
"""Every byte of a poisoned float: a NaN in all formats, and a number no healthy model returns."""


@dataclass(frozen=True)
class DeadRead:
    read: Read
    fate: str


def dead(engine: Engine, reads: Iterable[Read]) -> list[DeadRead]:
    """Those of the ``reads`` whose storage died, after a full garbage collection, with what became of it."""
    gc.collect()
    unique = {r.address: r for r in reads if r.dead}
    return [DeadRead(r, engine.fate(r.address, r.nbytes)) for r in unique.values()]


def scrambled(content: Tensor) -> Tensor:
    """Other values for a tensor, such that nothing that uses them as an index can leave its range: floats become NaN; integers and
    bools are mirrored inside their own range, and stay as they are where they are all equal."""
    if content.is_floating_point() or content.is_complex():
        return torch.full_like(content, float("nan"))
    if content.dtype == torch.bool:
        return ~content
    if content.numel() == 0:
        return content
    return content.max() + content.min() - content


@contextmanager
def overwritten(engine: Engine, reads: Iterable[DeadRead]) -> Iterator[None]:
    """Within it, the memory of dead reads that is mapped holds other values; afterwards what it held before."""
    undo: list[tuple[int, Tensor]] = []
    try:
        for found in reads:
            if found.read.nbytes and engine.fate(found.read.address, found.read.nbytes) in ("free", "reused"):
                undo.append((found.read.address, engine.overwrite(found.read.address, _content(found.read))))
        yield
    finally:
        for address, before in reversed(undo):
            engine.overwrite(address, before)


def _content(read: Read) -> Tensor:
    """Bytes to write over a dead read: NaN for floats, zeros for integers and bools, which as an index are always in range."""
    floating = read.dtype.is_floating_point or read.dtype.is_complex
    return torch.full((read.nbytes,), SIGNAL if floating else 0, dtype=torch.uint8, device="cuda")


def poison(tensors: Iterable[Tensor]) -> int:
    """Fills whole storages with the signal, byte by byte. Returns how many there were."""
    done: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in done and storage.nbytes():
            done.add(storage._cdata)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(SIGNAL)
    return len(done)
