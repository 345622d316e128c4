"""First use where no certificate covers: replay against eager, bit for bit, on the live input and on a second probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parity.runtime import rng, tree
from parity.runtime.invalidation import LOCAL, generators
from parity.runtime.record import Entry
from parity.runtime.state import kept, same_bits

_SEED = 20_011


def second_probe(leaves: list[Any]) -> list[Any]:
    """Other values in the same range: floating point drawn uniformly between minimum and maximum (0 and 1 where those are one or not
    finite), everything else reversed, which keeps indices legal."""
    return [_other(x).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]


def _other(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor.detach()
    if not tensor.dtype.is_floating_point:
        return torch.empty_like(tensor).copy_(tensor.reshape(-1).flip(0).reshape(tensor.shape))
    low, high = float(tensor.min()), float(tensor.max())
    if not (low < high and high - low < float("inf")):
        low, high = 0.0, 1.0
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return torch.empty_like(tensor).copy_(drawn.to(tensor.dtype))


def differs(entry: Entry, region: Callable[..., Any], module: nn.Module | None, leaves: list[Any], spec: Any) -> str:
    """How a replay differs from eager, in words; empty where it does not. Generators and buffers are left as they were."""
    owned = generators(module)
    streams = rng.save(owned, generators(module, "cpu"))
    LOCAL.busy = True
    try:
        # the probe in the middle: what a replay leaves behind must not reach the next one
        for name, values in (("this input", leaves), ("a second probe", second_probe(leaves)), ("this input again", leaves)):

            def eager(values: list[Any] = values) -> Any:
                args, kwargs = tree.leafed(tree.unflatten(values, spec))
                return region(*args, **kwargs)

            def graphed(values: list[Any] = values) -> Any:
                return entry.replay(values)

            expected = _observe(eager, module, streams)
            found = _observe(graphed, module, streams)
            if what := _difference(expected, found):
                return f"{what} on {name}"
    finally:
        LOCAL.busy = False
        rng.restore(streams)
        entry.replays = 0
    return ""


def _observe(call: Callable[[], Any], module: nn.Module | None, streams: rng.Streams) -> tuple[list[Any], Any, list[Tensor], Tensor]:
    with kept(module):
        rng.restore(streams)
        leaves, spec = tree.flatten(call())
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        buffers = [b.clone() for b in module.buffers()] if module is not None else []
        state = rng.save([g for g, _, _ in streams.others])
    return leaves, spec, buffers, torch.cat([state.device, *[s for _, s, _ in state.others]])


def _difference(expected: tuple[list[Any], Any, list[Tensor], Tensor], found: tuple[list[Any], Any, list[Tensor], Tensor]) -> str:
    if expected[1] != found[1]:
        return "the output has another structure"
    for i, (a, b) in enumerate(zip(expected[0], found[0], strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if not same_bits(a, b):
                return f"output leaf {i} differs from eager"
        elif type(a) is not type(b) or repr(a) != repr(b):
            return f"output leaf {i} is {b!r}, not {a!r}"
    if len(expected[2]) != len(found[2]) or not all(map(same_bits, expected[2], found[2])):
        return "a buffer differs from eager"
    return "" if torch.equal(expected[3], found[3]) else "the random stream differs from eager"
