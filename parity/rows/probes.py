"""Probes: inputs drawn from named distributions. Drawn on the host with a generator of their own, so that engines see the same bits.

A is image-like: uniform over the legal range. B is normal, scaled and shifted (3x + 2), and folded into that range. Integer inputs are
uniform in both, from different seeds.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

from parity.rows.family import Fixed, Input

if TYPE_CHECKING:
    from torch import Tensor

PROBES: Final = ("A", "B")


def _seed(name: str, seed: int, position: int) -> int:
    return zlib.crc32(f"{name}/{seed}/{position}".encode())


def draw(spec: Input, name: str, seed: int) -> Tensor:
    """One tensor of ``spec`` from distribution ``name`` (A or B) and a 32-bit ``seed``."""
    import torch

    if name not in PROBES:
        raise ValueError(f"no probe is called {name!r}: {', '.join(PROBES)}")
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.randint(int(spec.low), int(spec.high) + 1, spec.shape, generator=generator, dtype=dtype)
    if name == "A":
        unit = torch.rand(spec.shape, generator=generator)
    else:
        shifted = 3 * torch.randn(spec.shape, generator=generator) + 2
        unit = 1 - (shifted.remainder(2) - 1).abs()  # folded, not clamped: a clamp would pile half of it up at the edges
    return (spec.low + (spec.high - spec.low) * unit).to(dtype)


def make(specs: Any, name: str, seed: int) -> tuple[Any, list[dict[str, Any]]]:
    """The arguments that ``specs`` describe, and the description of every tensor drawn, for the evidence."""
    import torch
    from torch.utils import _pytree as pytree

    leaves, structure = pytree.tree_flatten(specs, is_leaf=lambda x: isinstance(x, (Input, Fixed)))  # dataclasses may be registered
    described: list[dict[str, Any]] = []
    values: list[Any] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Input):
            number = _seed(name, seed, position)
            values.append(draw(leaf, name, number))
            kind = {"A": "uniform", "B": "normal, 3x + 2, folded"}[name] if leaf.dtype.startswith(("float", "bfloat")) else "uniform"
            described.append({"probe": name, "distribution": kind, "shape": list(leaf.shape), "dtype": leaf.dtype,
                              "low": leaf.low, "high": leaf.high, "seed": number})  # fmt: skip
        elif isinstance(leaf, Fixed):
            values.append(torch.tensor(leaf.values, dtype=getattr(torch, leaf.dtype)))
        else:
            values.append(leaf)
    return pytree.tree_unflatten(values, structure), described
