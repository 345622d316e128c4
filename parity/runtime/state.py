"""Buffers as they were: warm-up, capture and validation are nobody's forwards. And equality of bits, which decides what moved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from parity.runtime.engine import on_device


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in type, shape, strides and every bit. Waits for the device."""
    if (a.dtype, a.shape, a.layout, a.device) != (b.dtype, b.shape, b.layout, b.device):
        return False
    if a.layout is not torch.strided:
        return False
    if a.stride() != b.stride():
        return False
    return bool(torch.equal(data_of(a), data_of(b)))


def data_of(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, flat, uint8. A view where that is possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # of one element or none, any stride is contiguous, and reshape would keep it
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def unlike(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[bool]:
    """Which of many pairs of dense tensors of one geometry differ in a bit, with one wait per device however many there are."""
    flags: dict[torch.device, list[Tensor]] = {}
    homes: list[tuple[torch.device, int]] = []
    for mine, theirs in zip(actual, expected, strict=True):
        group = flags.setdefault(mine.device, [])
        homes.append((mine.device, len(group)))
        group.append((data_of(mine) != data_of(theirs)).any())
    told = {device: torch.stack(group).tolist() for device, group in flags.items()}
    return [bool(told[device][place]) for device, place in homes]


@contextlib.contextmanager
def kept(module: nn.Module | None, *, executed: bool = True) -> Iterator[None]:
    """Puts buffers back, their identity and, where it moved, their values. ``executed``: False around a capture, which runs nothing
    on the device, so that only host buffers can have moved."""
    held = [(m, dict(m._buffers)) for m in module.modules()] if module is not None else []
    every = list({id(b): b for _, buffers in held for b in buffers.values() if b is not None}.values())
    now = [b for b in every if b.layout is torch.strided and (executed or not on_device(b))]
    saved = [b.clone() for b in now]
    try:
        yield
    finally:
        for owner, buffers in held:
            if _other(owner._buffers, buffers):
                owner._buffers.clear()
                owner._buffers.update(buffers)
        for buffer, before, moved in zip(now, saved, unlike(now, saved), strict=True):
            if moved:  # written only where needed: a write moves the version counter
                with torch.inference_mode() if buffer.is_inference() else torch.no_grad():
                    buffer.copy_(before)


def _other(now: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> bool:
    return len(now) != len(before) or any(name not in before or before[name] is not value for name, value in now.items())
