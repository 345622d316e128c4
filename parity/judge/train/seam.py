"""What a capture of a network does where network and loss meet, done to an eager step: the layout in which gradients arrive there, and
the backward of the network apart from that of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.runtime import tree


class _Static(torch.autograd.Function):
    """Passes tensors on. Their gradients are copied into memory laid out like the tensors, zeros where none arrives, and go on all at
    once: as a captured backward gets them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.buffers = [torch.empty_like(t) for t in tensors]
        return tuple(t.data for t in tensors)  # no views: the loss may write to them

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(buffer.copy_(grad) for buffer, grad in zip(ctx.buffers, grads, strict=True))


def as_static(result: Any) -> Any:
    """The outputs, with gradients as a capture like torch's gets them."""
    leaves, spec, places = _differentiable(result)
    return _rebuilt(leaves, spec, places, _Static.apply(*(leaves[i] for i in places))) if places else result


class _Cut(torch.autograd.Function):
    """Passes tensors on, and keeps the gradients that arrive. ``anchor``: what makes the results differentiable."""

    @staticmethod
    def forward(ctx: Any, seam: Seam, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.seam = seam
        ctx.set_materialize_grads(False)  # an output without a gradient is not one whose gradient is zero
        return tuple(t.data for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.seam.grads = grads
        return (None,) * (2 + len(grads))


class Seam:
    """A network's outputs, cut off from it. The backward of the loss ends there; that of the network is a call of its own, and can be
    run under other conditions, as the one in a graph was captured under others than the loss' runs under."""

    def __init__(self) -> None:
        self.grads: Sequence[Tensor | None] = ()
        self._roots: list[Tensor] = []

    def cut(self, result: Any) -> Any:
        """The outputs, for the loss."""
        leaves, spec, places = _differentiable(result)
        if not places:
            return result
        self._roots = [leaves[i] for i in places]
        anchor = torch.zeros((), device=self._roots[0].device, requires_grad=True)
        return _rebuilt(leaves, spec, places, _Cut.apply(self, anchor, *(t.detach() for t in self._roots)))

    def backward(self) -> None:
        """Of the network alone, from the gradients that the loss' backward has brought here."""
        given = [(t, g) for t, g in zip(self._roots, self.grads, strict=False) if g is not None]
        self._roots, self.grads = [], ()
        if given:
            torch.autograd.backward([t for t, _ in given], [g for _, g in given])


def _differentiable(result: Any) -> tuple[list[Any], Any, list[int]]:
    leaves, spec = tree.flatten(result)
    return leaves, spec, [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]


def _rebuilt(leaves: list[Any], spec: Any, places: list[int], tensors: tuple[Tensor, ...]) -> Any:
    for i, tensor in zip(places, tensors, strict=True):
        leaves[i] = tensor
    return tree.unflatten(leaves, spec)
