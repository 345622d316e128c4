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


class Ref:
    """A tensor of the tape: a storage, and how it is looked at."""

    __slots__ = ("key", "tensor")

    def __init__(self, tensor: Tensor, key: int) -> None:
        self.tensor = tensor
        setattr(tensor, TAPES_OWN, True)
        self.key = key


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
        old, conjugate, negative = ref.tensor, ref.tensor.is_conj(), ref.tensor.is_neg()
        view = torch.empty(0, dtype=old.dtype).set_(self.raw, old.storage_offset(), old.shape, old.stride())
        self.views.append(view)
        if conjugate:
            view = view.conj()
        ref.tensor = torch._neg_view(view) if negative else view
        if ref.tensor is not view:
            self.views.append(ref.tensor)

    def hold(self) -> UntypedStorage | None:
        """The storage, if it is alive and where it was; else None, and the views look at poison."""
        storage = None if self.poison is not None else UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        if storage is not None and storage.data_ptr() == self.address and storage.nbytes() >= self.nbytes:
            return storage
        if self.poison is None:
            self.poison = UntypedStorage(self.nbytes)
            for view in self.views:
                view.set_(self.poison, view.storage_offset(), view.shape, view.stride())
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
