"""Comparing raw bits. There is no tolerance anywhere: -0.0 is not 0.0, and equal NaN payloads are equal.

Three steps, as three functions: ``compare`` pairs up two flat lists of leaves and returns every difference, ``differences`` looks at
pairs, ``str(Difference)`` words one. A ``Bundle`` holds many leaves as one tensor of bytes, so that the usual case, no difference,
costs one operation and one synchronisation however many leaves there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.runtime.state import data_of

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """How one leaf differs. ``count`` of ``total`` elements; indices are flat; ``max_ulp`` is -1 where ULPs mean nothing.

    ``kind``: values, shape, dtype, structure (one side is missing or of another type), object (a non-tensor leaf).
    """

    path: str
    kind: str
    count: int = 0
    total: int = 0
    first: int = -1
    worst: int = -1
    max_ulp: int = -1
    detail: str = ""

    def __str__(self) -> str:
        if self.kind != "values":
            return f"{self.path}: {self.detail}"
        ulp = f", at most {self.max_ulp} ULP at [{self.worst}]" if self.max_ulp >= 0 else ""
        share = 100 * self.count / self.total
        return f"{self.path}: {self.count} of {self.total} elements ({share:.3g} %), first at [{self.first}]{ulp}"


def raw(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor as a flat tensor of integers: uint8 to int64 by element size; complex128 as pairs of int64."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().view(_INTEGER[plain.element_size()]).reshape(-1)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits. Strides may differ."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(raw(actual), raw(expected))


def ordered(tensor: Tensor) -> Tensor:
    """Bits of a floating-point tensor as int64 such that neighbours in value are neighbours: |a - b| counts representable numbers.

    Source: Dawson, "Comparing floating point numbers, 2012 edition"; the sign bit is folded so that -0.0 and 0.0 are one apart.
    """
    bits = raw(tensor).to(torch.int64)
    if tensor.element_size() == 1:
        bits = torch.where(bits > 127, bits - 256, bits)
    smallest = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, smallest - bits - 1, bits)


def _measured(actual: Tensor, expected: Tensor) -> Tensor:
    """Of two tensors of one form: how many elements differ, flat indices of the first and of the worst, and the ``ordered`` bits that
    both have there. Nothing waits for the device. Distances of float64 need 64 bits without a sign: the subtraction wraps around to
    them, and flipping the sign bit puts them in order."""
    a, b = raw(actual), raw(expected)
    unequal = a != b
    first = unequal.to(torch.uint8).argmax()
    if not actual.is_floating_point():
        return torch.stack([unequal.sum(), first, first, first, first])
    a, b = ordered(actual), ordered(expected)
    worst = ((torch.maximum(a, b) - torch.minimum(a, b)) ^ torch.iinfo(torch.int64).min).argmax()
    return torch.stack([unequal.sum(), first, worst, a.take(worst), b.take(worst)])


def gathered(tensors: Sequence[Tensor]) -> list[Any]:
    """The values of tensors of one shape, as nested lists, at one synchronisation per device."""
    found: list[Any] = [None] * len(tensors)
    for device in {t.device for t in tensors}:
        here = [i for i, t in enumerate(tensors) if t.device == device]
        for i, values in zip(here, torch.stack([tensors[i] for i in here]).tolist(), strict=True):
            found[i] = values
    return found


def differences(pairs: Sequence[tuple[str, object, object]]) -> list[Difference | None]:
    """What differs in each of (path, actual, expected), or None, at one synchronisation per device. Tensors by bits, everything else by
    type and ``==`` (NaN is NaN, -0.0 is not 0.0)."""
    found = [_formed_apart(path, actual, expected) for path, actual, expected in pairs]
    alike = [
        (i, actual, expected)
        for i, (_, actual, expected) in enumerate(pairs)
        if found[i] is None and isinstance(actual, Tensor) and isinstance(expected, Tensor) and actual.numel()
    ]
    told = gathered([_measured(actual, expected) for _, actual, expected in alike])
    for (i, tensor, _), (count, first, worst, mine, theirs) in zip(alike, told, strict=True):
        if count:
            ulp = abs(mine - theirs) if tensor.is_floating_point() else -1
            found[i] = Difference(pairs[i][0], "values", count, raw(tensor).numel(), first, worst, ulp)
    return found


def difference(path: str, actual: object, expected: object) -> Difference | None:
    """What differs between two leaves, or None."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor) and same(actual, expected):
        return None
    return differences([(path, actual, expected)])[0]


def _formed_apart(path: str, actual: object, expected: object) -> Difference | None:
    """What differs but the values of tensors."""
    if not (isinstance(actual, Tensor) and isinstance(expected, Tensor)):
        if _same_object(actual, expected):
            return None
        kind = "structure" if type(actual) is not type(expected) else "object"
        return Difference(path, kind, detail=f"{_name(actual)}, expected {_name(expected)}")
    if actual.dtype != expected.dtype:
        return Difference(path, "dtype", detail=f"{actual.dtype}, expected {expected.dtype}")
    if actual.shape != expected.shape:
        return Difference(path, "shape", detail=f"{tuple(actual.shape)}, expected {tuple(expected.shape)}")
    return None


def _same_object(actual: object, expected: object) -> bool:
    if type(actual) is not type(expected):
        return False
    if isinstance(actual, (float, complex)):
        return repr(actual) == repr(expected)
    return bool(actual == expected)


def compare(actual: Sequence[tuple[str, Any]], expected: Sequence[tuple[str, Any]]) -> list[Difference]:
    """Every difference between two lists of (path, leaf), structure first: where the paths differ, values are not looked at."""
    mine, theirs = [p for p, _ in actual], [p for p, _ in expected]
    if mine != theirs:
        missing = [Difference(p, "structure", detail="missing") for p in theirs if p not in mine]
        extra = [Difference(p, "structure", detail="not expected") for p in mine if p not in theirs]
        return missing + extra or [Difference("output", "structure", detail="leaves in another order")]
    found = (difference(p, a, b) for (p, a), (_, b) in zip(actual, expected, strict=True))
    return [d for d in found if d is not None]


@dataclass(frozen=True)
class Bundle:
    """A copy of (path, leaf) pairs. ``kinds``: dtype and shape of a tensor, the value of anything else. ``data``: all bytes, a tensor
    per device; ``homes``: which of them each leaf lies in (-1: no tensor)."""

    paths: tuple[str, ...]
    kinds: tuple[Any, ...]
    homes: tuple[int, ...]
    data: tuple[Tensor, ...]

    def leaves(self) -> list[tuple[str, Any]]:
        """The pairs again, tensors as they were."""
        return [(path, self.leaf(i)) for i, path in enumerate(self.paths)]

    def leaf(self, index: int) -> Any:
        """One leaf, a tensor as it was."""
        home, kind = self.homes[index], self.kinds[index]
        if home < 0:
            return kind
        dtype, shape = kind
        return self.data[home][self._starts[index] : self._starts[index] + _size(kind)].clone().view(dtype).reshape(shape)

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Per leaf the offset of its first byte."""
        ends = [0] * len(self.data)
        starts = []
        for kind, home in zip(self.kinds, self.homes, strict=True):
            starts.append(ends[home] if home >= 0 else 0)
            if home >= 0:
                ends[home] += _size(kind)
        return starts

    def formed_alike(self, other: Bundle) -> bool:
        """Whether paths, dtypes, shapes, devices and everything that is no tensor are the same."""
        return (self.paths, self.homes) == (other.paths, other.homes) and all(map(_same_object, self.kinds, other.kinds))

    def same(self, other: Bundle) -> bool:
        """Whether all leaves are the same, at one synchronisation per device."""
        return self is other or (self.formed_alike(other) and all(map(torch.equal, self.data, other.data)))

    def apart(self, other: Bundle) -> list[bool]:
        """Per leaf whether its bits differ, at one synchronisation per device. For bundles that are formed alike."""
        found = [False] * len(self.paths)
        for home, (mine, theirs) in enumerate(zip(self.data, other.data, strict=True)):
            here = [i for i, h in enumerate(self.homes) if h == home]
            if not len(mine):
                continue
            wide = torch.int32 if len(mine) < 2**31 else torch.int64
            unequal = torch.nn.functional.pad((mine != theirs).cumsum(0, dtype=wide), (1, 0))
            starts = torch.tensor([self._starts[i] for i in here], device=mine.device)
            ends = torch.tensor([self._starts[i] + _size(self.kinds[i]) for i in here], device=mine.device)
            for i, flag in zip(here, (unequal[ends] != unequal[starts]).tolist(), strict=True):
                found[i] = flag
        return found

    def unlike(self, expected: Bundle) -> list[Difference]:
        """Every difference from ``expected``; no leaf is looked at alone whose bytes are alike."""
        if self.same(expected):
            return []
        if not self.formed_alike(expected):
            return compare(self.leaves(), expected.leaves())
        unequal = [i for i, differs in enumerate(self.apart(expected)) if differs]
        found = differences([(self.paths[i], self.leaf(i), expected.leaf(i)) for i in unequal])
        return [d for d in found if d is not None]


def _size(kind: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """Bytes of a tensor of a dtype and shape."""
    return math.prod(kind[1]) * kind[0].itemsize


def bundle(leaves: Sequence[tuple[str, Any]]) -> Bundle:
    """Copies the leaves. Dense tensors only."""
    parts: dict[torch.device, list[Tensor]] = {}
    kinds: list[Any] = []
    homes: list[int] = []
    for _, leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append((leaf.dtype, tuple(leaf.shape)))
            parts.setdefault(leaf.device, []).append(data_of(leaf))
            homes.append(list(parts).index(leaf.device))
        else:
            kinds.append(leaf)
            homes.append(-1)
    data = tuple(torch.cat(group) if len(group) > 1 else group[0].clone() for group in parts.values())
    return Bundle(tuple(p for p, _ in leaves), tuple(kinds), tuple(homes), data)


def _name(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.80}"
