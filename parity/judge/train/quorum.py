"""Several runs of one step, tensor by tensor: the set of bit patterns that each shows, and how far they lie apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity.judge.bits import Bundle, Difference, compare, difference, gathered, same


@dataclass(frozen=True)
class Varying:
    """One leaf that is not the same in all runs of eager and an arm. ``eager``, ``arm``: per run the number of the pattern it showed.
    ``formed_alike``: no run differs in more than values; ``counts``: they are whole numbers. ``look``: gives the arm's first value that
    is not eager's first, and that; None where there is none."""

    path: str
    eager: tuple[int, ...]
    arm: tuple[int, ...]
    distances: tuple[tuple[float, ...], ...]
    formed_alike: bool
    counts: bool
    look: Callable[[], tuple[Any, Any]] | None = field(compare=False, repr=False)

    @functools.cached_property
    def apart(self) -> Difference | None:
        """The arm's first value that differs from eager's first, against it, or None."""
        if self.look is None:
            return None
        mine, theirs = self.look()
        return compare([(self.path, mine)], [(self.path, theirs)])[0]

    @property
    def noisy(self) -> bool:
        """Whether eager differs from itself."""
        return len(set(self.eager)) > 1


def numbered(values: Sequence[Any]) -> tuple[int, ...]:
    """Per value the number of its bit pattern, counted from 0 in order of appearance."""
    known: list[Any] = []
    numbers = []
    for value in values:
        found = next((n for n, other in enumerate(known) if _alike(value, other)), None)
        if found is None:
            found = len(known)
            known.append(value)
        numbers.append(found)
    return tuple(numbers)


def _alike(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return same(value, other)
    return difference("", value, other) is None


def distances(values: Sequence[Any]) -> tuple[tuple[float, ...], ...]:
    """Pairwise Euclidean distances over the largest norm, in float64; infinite where two values are not both tensors of one shape.
    NaN and infinities count as a difference of one where only one side has them."""
    shapes = {(x.dtype, x.shape) if isinstance(x, Tensor) else None for x in values}
    if len(shapes) > 1 or None in shapes:
        return tuple(tuple(0.0 if _alike(a, b) else math.inf for b in values) for a in values)
    return tuple(map(tuple, _distances(values).tolist()))


def _distances(values: Sequence[Tensor]) -> Tensor:
    """The same of tensors of one dtype and shape, where they are: nothing waits for the device."""
    wide = torch.complex128 if values[0].is_complex() else torch.float64
    rows = torch.stack([x.detach().reshape(-1).to(wide) for x in values])
    if wide == torch.complex128:
        rows = torch.view_as_real(rows).flatten(1)
    odd = ~rows.isfinite()
    rows = rows.masked_fill(odd, 0.0)
    largest = rows.norm(dim=1).amax()
    largest = torch.where(largest > 0, largest, 1.0)
    return torch.stack([(rows - row).norm(dim=1) / largest + (odd != bad).sum(1) for row, bad in zip(rows, odd, strict=True)])


def varying(eager: Sequence[Bundle], arm: Sequence[Bundle], *, measured: bool = True) -> list[Varying]:
    """The leaves that are not alike in all runs; empty at the cost of one comparison per run where all are. ``measured``: with
    distances, which take time. Runs that are formed alike are compared whole: on a device that several processes share, each
    synchronisation costs a turn of all the others."""
    every = [*eager, *arm]
    if all(run.same(every[0]) for run in every[1:]):
        return []
    if all(run.formed_alike(every[0]) for run in every[1:]):
        return _varying_alike(every, len(eager), measured)
    told = [{path: functools.partial(run.leaf, i) for i, path in enumerate(run.paths)} for run in every]
    found = []
    for path in dict.fromkeys(path for leaves in told for path in leaves):
        looks = [leaves.get(path, _missing) for leaves in told]
        values = [look() for look in looks]
        numbers = numbered(values)
        if len(set(numbers)) > 1:
            kinds = {(v.dtype, tuple(v.shape)) if isinstance(v, Tensor) else None for v in values}
            gaps = distances(values) if measured else ()
            found.append(_varying(path, looks, numbers, len(eager), kinds.pop() if len(kinds) == 1 else None, gaps))
    return found


def _varying_alike(every: Sequence[Bundle], eager: int, measured: bool) -> list[Varying]:
    """Of runs that are formed alike, the first ``eager`` of which are eager's."""
    first = every[0]
    numbers = _patterns(every)
    leaves = [i for i, seen in enumerate(numbers) if len(set(seen)) > 1]
    gaps = gathered([_distances([run.leaf(i) for run in every]) for i in leaves]) if measured else [()] * len(leaves)
    return [
        _varying(
            first.paths[i], [functools.partial(run.leaf, i) for run in every], numbers[i], eager, first.kinds[i], tuple(map(tuple, gap))
        )
        for i, gap in zip(leaves, gaps, strict=True)
    ]


def _patterns(runs: Sequence[Bundle]) -> list[tuple[int, ...]]:
    """Per leaf, and per run, the number of its bit pattern, as ``numbered`` counts."""
    leaves = range(len(runs[0].paths))
    numbers: list[list[int]] = [[] for _ in leaves]
    for j, run in enumerate(runs):
        unlike = [[False] * len(leaves) if run is other else run.apart(other) for other in runs[:j]]
        for leaf in leaves:
            match = next((i for i in range(j) if not unlike[i][leaf]), None)
            numbers[leaf].append(max(numbers[leaf], default=-1) + 1 if match is None else numbers[leaf][match])
    return [tuple(n) for n in numbers]


class _Missing:
    """A leaf that a run does not have at all."""

    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _missing() -> Any:
    return _MISSING


def _varying(
    path: str,
    looks: Sequence[Callable[[], Any]],
    numbers: tuple[int, ...],
    count: int,
    kind: tuple[torch.dtype, tuple[int, ...]] | None,
    gaps: tuple[tuple[float, ...], ...],
) -> Varying:
    """``kind``: dtype and shape in all runs; None where there is no such thing."""
    other = next((look for look, n in zip(looks[count:], numbers[count:], strict=True) if n != numbers[0]), None)
    whole = kind is not None and not (kind[0].is_floating_point or kind[0].is_complex)
    pair = None if other is None else functools.partial(_pair, other, looks[0])
    return Varying(path, numbers[:count], numbers[count:], gaps, kind is not None, whole, pair)


def _pair(mine: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[Any, Any]:
    return mine(), theirs()
