"""Gradients into and out of a captured backward: the layout that eager gives them, and memory that nobody else writes to.

A reduction over an incoming gradient adds in the order of its strides, so the static buffer has the strides (and the alignment) with
which eager's arrived. What goes out is the graph's own memory, at no cost, as long as nobody holds it when the next replay begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from parity.runtime.buffers import dense, twin

Layout = tuple[tuple[int, ...], int] | None
"""Strides in elements, and the address modulo 16; None where no gradient arrives."""

ODD: Final[Layout] = ((), -1)
"""A gradient that no static buffer can stand for: sparse, of a subclass, lazily conjugated or negated."""


def layout(grad: Tensor | None) -> Layout:
    if grad is None:
        return None
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.is_conj() or grad.is_neg():
        return ODD
    return grad.stride(), grad.data_ptr() & 15


def blank(output: Tensor, wanted: Layout) -> Tensor | None:
    """Zeros in the shape, type and place of ``output``, laid out as ``wanted``."""
    if wanted is None:
        return None
    strides, alignment = wanted
    shift = alignment // output.element_size()
    span = 0 if output.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(output.shape, strides, strict=True))
    memory = torch.zeros(span + shift, dtype=output.dtype, device=output.device)
    return memory.as_strided(output.shape, strides, shift)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _holders(storage: int) -> int:
    return int(torch._C._storage_Use_Count(storage))


class Handout:
    """The static gradients of one captured backward.

    ``statics``: per tensor that gradients go to; None where eager gives none. ``owners``: the parameter, or None for an input, whose
    gradient others may keep and is therefore always copied. ``foreign``: tensors whose memory a gradient must not be handed out in.
    """

    def __init__(
        self, statics: list[Tensor | None], owners: list[nn.Parameter | None], foreign: Iterable[Tensor], cloning: bool
    ) -> None:
        self.statics = statics
        self.cloning = cloning
        places = [_address(g) for g in statics if g is not None]
        taken = {_address(t) for t in foreign}
        self._lendable: list[tuple[int, nn.Parameter, int]] = []
        for i, (grad, owner) in enumerate(zip(statics, owners, strict=True)):
            if grad is not None and owner is not None and dense(grad):
                place = _address(grad)
                if places.count(place) == 1 and place not in taken:  # shared memory: two parameters would scale each other's gradient
                    self._lendable.append((i, owner, place))
        self._base = [_holders(place) for _, _, place in self._lendable]
        self._lent = False
        self.moved = 0
        """Gradients that had to leave the graph's memory so far."""

    def settle(self) -> bool:
        """Before the backward is replayed: moves each ``p.grad`` out of its memory to some of its own. False where somebody else
        still holds what was handed out, so that the graph must not be replayed."""
        if not self._lent:
            return True
        self._lent = False
        lying: list[Any] = []
        for _, owner, place in self._lendable:
            held = owner.grad
            if held is not None and held.layout is torch.strided and _address(held) == place:
                lying.append(held)
        if lying:
            self.moved += len(lying)
            with torch.no_grad():
                fresh = [torch.empty_like(g) for g in lying]
                torch._foreach_copy_(fresh, [g.detach() for g in lying])
                for held, own in zip(lying, fresh, strict=True):
                    held.data = own
        return all(_holders(place) <= base for (_, _, place), base in zip(self._lendable, self._base, strict=True))

    def take(self) -> list[Tensor | None]:
        """The gradients of the last replay."""
        lent: set[int] = set()
        if not self.cloning:
            lent = {i for i, _, _ in self._lendable}
            self._lent = True
        out: list[Tensor | None] = [None] * len(self.statics)
        copied: list[int] = []
        for i, grad in enumerate(self.statics):
            if grad is None:
                continue
            if i in lent:
                out[i] = grad.detach()
            elif dense(grad):
                out[i] = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
                copied.append(i)
            else:
                out[i] = twin(grad)
        if copied:
            targets: list[Any] = [out[i] for i in copied]
            sources: list[Any] = [self.statics[i] for i in copied]
            torch._foreach_copy_(targets, sources)
        return out
