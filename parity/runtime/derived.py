"""Tensors that a graph reads and that are neither input, parameter nor buffer: computed from weights, or replaced by their owner.

A graph goes on reading the storages it was recorded with, which are held here. Whether they still are what eager would read is another
matter: a storage that nobody else holds, or that left its place in the module, was superseded by its owner.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from parity.runtime.liveness import Read, hold
from parity.runtime.state import same_bits

_DEPTH = 4


class Derived:
    """``renew`` compares what the owner has now with what the graph reads. Equal bits: the graph stays, the owner's new tensors are
    watched from then on."""

    def __init__(self, reads: list[Read], module: nn.Module | None) -> None:
        self._module = weakref.ref(module) if module is not None else None
        self._read: list[Any] = []
        self._about: list[tuple[Any, ...]] = []
        for read in reads:
            for storage in hold([read]):
                self._read.append(storage)
                self._about.append(_about(read))
        self._watch(reads)

    def _watch(self, reads: list[Read]) -> None:
        self._current = [storage for read in reads for storage in hold([read])]
        module = self._module() if self._module is not None else None
        self._places = [(place, s) for r, s in zip(reads, self._current, strict=True) if (place := _place(module, r.path)) is not None]

    def __len__(self) -> int:
        return len(self._read)

    def settle(self) -> None:
        """Right after a capture: what the capture itself replaced in the module is not watched, its owner has not spoken yet."""
        self._current = [s for s in self._current if not _orphan(s)]
        self._places = [(p, s) for p, s in self._places if _stands(p, s)]

    def superseded(self) -> bool:
        """Whether nobody but this holds one of the tensors. Cheap."""
        return any(map(_orphan, self._current))

    def replaced(self) -> bool:
        """Whether a tensor is no longer where the module had it, though somebody else may hold it."""
        return not all(_stands(place, storage) for place, storage in self._places)

    def renew(self, reads: list[Read]) -> bool:
        """Whether a fresh trace reads the same bits in the same order."""
        fresh = [(s, _about(read)) for read in reads for s in hold([read])]
        if [about for _, about in fresh] != self._about or len(fresh) != len(reads):
            return False
        for old, (new, _) in zip(self._read, fresh, strict=True):
            if old._cdata != new._cdata and not same_bits(_content(old), _content(new)):
                return False
        self._watch(reads)
        return True


def _orphan(storage: Any) -> bool:
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 1)


def _stands(place: tuple[Any, str], storage: Any) -> bool:
    module = place[0]()
    return module is not None and _reaches(vars(module).get(place[1]), storage._cdata, _DEPTH)


def _about(read: Read) -> tuple[Any, ...]:
    return read.path, read.shape, read.dtype, read.nbytes


def _content(storage: Any) -> Tensor:
    device = "cuda" if storage.device.type == "cpu" else storage.device  # an emulated storage calls itself a host's
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _place(module: nn.Module | None, path: str) -> tuple[Any, str] | None:
    """The submodule and attribute under which a path begins."""
    if module is None or not path:
        return None
    found: tuple[Any, str] | None = None
    for name, child in module.named_modules():
        if name and not path.startswith(name + "."):
            continue
        attribute = re.split(r"[.\[]", path[len(name) :].lstrip("."))[0]
        if attribute in vars(child):
            found = (weakref.ref(child), attribute)
    return found


def _reaches(value: Any, storage: int, left: int) -> bool:
    if isinstance(value, Tensor):
        return value.layout is torch.strided and value.untyped_storage()._cdata == storage
    if left and isinstance(value, (dict, list, tuple)):
        return any(_reaches(v, storage, left - 1) for v in (value.values() if isinstance(value, dict) else value))
    return False
