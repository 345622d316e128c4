"""What a tape points to: tensors of its own, and addresses of others that may die."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

POISON: Final = 0xFF


class DeadRead(NamedTuple):
    """A storage that a replay used after it had died, as its first use sees it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


TAPES_OWN: Final = "_parity_of_a_tape"
"""Attribute of the tensors that a tape itself looks through: no Python code of a model's holds them."""


class Layout(NamedTuple):
    """How a storage is looked at."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool

    @property
    def reach(self) -> int:
        """Bytes from the start of the storage to the end of the last element."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def at(self, storage: UntypedStorage, empty: bool = False) -> list[Tensor]:
        """Tensors that look at a storage this way, the last being the one to compute with; ``empty``: at nothing yet."""
        plain = torch.empty(0, dtype=self.dtype)
        views = [plain if empty else plain.set_(storage, self.offset, self.shape, self.stride)]
        if self.conjugate:
            views.append(views[-1].conj())
        if self.negative:
            views.append(torch._neg_view(views[-1]))
        for view in views:
            setattr(view, TAPES_OWN, True)
        return views


def layout_of(tensor: Tensor) -> Layout:
    return Layout(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


class Ref:
    """A tensor of the tape: a storage, and how it is looked at. ``tensor`` keeps the storage of another alive; what the capture
    allocated itself is not kept, and has none until the tape is finished."""

    __slots__ = ("key", "layout", "tensor")

    def __init__(self, layout: Layout, key: int, tensor: Tensor | None) -> None:
        self.layout, self.key = layout, key
        self.tensor = tensor
        if tensor is not None:
            setattr(tensor, TAPES_OWN, True)


def moved(views: Iterable[Tensor], storage: UntypedStorage) -> None:
    """From now on the views look at this storage, each as it did."""
    for view in views:
        view.set_(storage, view.storage_offset(), view.shape, view.stride())


class External:
    """A storage that the tape uses and does not own: its address, and a weak reference that tells whether it is still there."""

    def __init__(self, storage: UntypedStorage) -> None:
        self.weak = StorageWeakRef(storage)
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.views: list[Tensor] = []
        self.poison: UntypedStorage | None = None
        self.raw = UntypedStorage(0)
        if self.nbytes:
            window = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
            self.raw = torch.frombuffer(window, dtype=torch.uint8).untyped_storage()

    def adopt(self, ref: Ref) -> None:
        """From now on the tensor looks at the address and keeps nothing alive."""
        views = ref.layout.at(self.raw)
        self.views += views
        ref.tensor = views[-1]

    def hold(self) -> UntypedStorage | None:
        """The storage, if it is alive and where it was; else None, and the views look at poison."""
        storage = None if self.poison is not None else UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        if storage is not None and storage.data_ptr() == self.address and storage.nbytes() >= self.nbytes:
            return storage
        if self.poison is None:
            self.poison = UntypedStorage(self.nbytes)
            moved(self.views, self.poison)
        self.poison.fill_(POISON)  # type: ignore[attr-defined]
        return None

    @property
    def dead_read(self) -> DeadRead:
        return DeadRead(tuple(self.views[0].shape), self.views[0].dtype)


def refs_in(values: Iterable[Any]) -> Iterator[Ref]:
    for value in values:
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, list):
            yield from refs_in(value)


def filled(value: Any) -> Any:
    if isinstance(value, Ref):
        return value.tensor
    return [filled(v) for v in value] if isinstance(value, list) else value
