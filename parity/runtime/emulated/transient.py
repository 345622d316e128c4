"""What a capture allocated: kept for whoever still looks at it, and otherwise only while a replay needs it.

A forward's intermediate results are dead when its capture ends, and no replay can read one before it has written it: they need no
memory of their own. Keeping all of them for each graph cost more than the kernels: ten times the memory, its pages to be cleared by the
system, and a copy of each result.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from .addresses import Layout, Ref
from .memory import BLOCK

SMALL: Final = 2**16
"""Bytes; what is smaller is kept: copying it costs less than moving its views."""


class Owned:
    """A storage that a capture allocated, held weakly: its address names no other one for as long as this lives. Its block counts as
    allocated until then, as a graph's pool does."""

    __slots__ = ("_block", "_weak", "nbytes")

    def __init__(self, storage: UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)
        self._block = getattr(storage, BLOCK, None)
        self.nbytes = storage.nbytes()

    def alive(self) -> UntypedStorage | None:
        found: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return found


class Use:
    """What a tape's operations do to one storage. ``refs``: how they look at it, each once, in their order; ``born``: the ref of the
    result that is its first use; ``last``: place of the last use; ``reach``: bytes that any looks at."""

    def __init__(self) -> None:
        self.refs: dict[int, Ref] = {}
        self.born: Ref | None = None
        self.last = self.reach = 0
        self.written = False

    def add(self, ref: Ref, place: int, result: bool = False) -> None:
        if result and not self.refs:
            self.born = ref
        self.refs[id(ref)] = ref
        self.last = place
        self.reach = max(self.reach, ref.layout.reach)
        self.written |= result

    def fills(self, nbytes: int) -> bool:
        """Whether the first use writes every byte of a storage, so that what it held before is never read."""
        layout = None if self.born is None else self.born.layout
        return layout is not None and not layout.offset and layout.reach == nbytes == layout.shape.numel() * layout.dtype.itemsize


class _View(NamedTuple):
    tensor: Tensor
    layout: Layout


class Transient:
    """A storage that an operation's result fills whole, and that only the tape looks at: it lies where that operation puts it, from
    then until its last use."""

    def __init__(self, nbytes: int, born: Layout) -> None:
        self.nbytes, self.born = nbytes, born
        self._views: list[_View] = []

    def adopt(self, layout: Layout) -> Tensor:
        """A tensor that will look at the storage this way."""
        tensors = layout.at(UntypedStorage(0), empty=True)
        self._views += [_View(tensor, layout) for tensor in tensors]
        return tensors[-1]

    def take(self, out: Tensor) -> None:
        storage = out.untyped_storage()
        if storage.nbytes() != self.nbytes or out.storage_offset() or out.stride() != self.born.stride:
            storage = UntypedStorage(self.nbytes)  # laid out in another way than while capturing
            self.born.at(storage)[-1].copy_(out)
        for tensor, layout in self._views:
            tensor.set_(storage, layout.offset, layout.shape, layout.stride)

    def drop(self) -> None:
        nothing = UntypedStorage(0)
        for tensor, _ in self._views:
            tensor.set_(nothing, 0, (0,), (1,))


def put(out: Tensor, target: Tensor | Transient) -> None:
    if isinstance(target, Transient):
        target.take(out)
    else:
        target.copy_(out)
