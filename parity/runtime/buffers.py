"""What goes into a graph and what comes out: static inputs with the caller's geometry, results that nobody else writes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.runtime import tree

_LEAF = (Tensor, bool, int, float, complex, str, bytes, type(None))


def _span(tensor: Tensor) -> int:
    return 0 if tensor.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def flat(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, as one dimension."""
    return tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset())


def overlapping(tensor: Tensor) -> bool:
    """Whether several elements may share memory (expanded tensors, sliding windows)."""
    return bool(torch._debug_has_internal_overlap(tensor))


def dense(tensor: Tensor) -> bool:
    """Whether a clone has the same strides."""
    return not overlapping(tensor) and _span(tensor) == tensor.numel()


def twin(tensor: Tensor) -> Tensor:
    """Fresh memory of the same shape, strides and alignment (to 16 bytes), values copied."""
    shift = 0 if tensor.numel() == 0 else (tensor.data_ptr() & 15) // tensor.element_size()
    memory = torch.empty(_span(tensor) + shift, dtype=tensor.dtype, device=tensor.device)
    fresh = memory.as_strided(tensor.shape, tensor.stride(), shift)
    if overlapping(tensor):
        flat(fresh).copy_(flat(tensor))
    else:
        fresh.copy_(tensor)
    return fresh


class Intake:
    """Static inputs. ``leaves``: those of the call, tensors replaced by the graph's own; one object given twice stays one object."""

    def __init__(self, leaves: list[Any]) -> None:
        made: dict[int, Tensor] = {}
        self.leaves: list[Any] = []
        self._plain: list[int] = []
        self._odd: list[int] = []
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                self.leaves.append(leaf)
                continue
            if id(leaf) not in made:
                made[id(leaf)] = twin(leaf)
                (self._odd if overlapping(leaf) else self._plain).append(position)
            self.leaves.append(made[id(leaf)])
        self._targets = [self.leaves[i] for i in self._plain]
        self._only = self._plain[0] if len(self._plain) == 1 else None

    def fill(self, leaves: Any) -> None:
        if self._only is not None:
            self._targets[0].copy_(leaves[self._only])
        elif self._targets:
            torch._foreach_copy_(self._targets, [leaves[i] for i in self._plain])
        for position in self._odd:
            flat(self.leaves[position]).copy_(flat(leaves[position]))


class Outlet:
    """Static outputs. ``hand_out`` gives clones with eager's strides; an input that was passed on is the caller's own again.

    ``clone=False``: the graph's own tensors, which the next replay of the same graph overwrites.
    """

    def __init__(self, result: Any, statics: list[Any], clone: bool) -> None:
        self.leaves, self._spec = tree.flatten(result)
        given = {id(x): i for i, x in reversed(list(enumerate(statics))) if isinstance(x, Tensor)}
        first: dict[int, int] = {}
        self._fixed: list[tuple[int, Any]] = []
        self._inputs: list[tuple[int, int]] = []
        self._again: list[tuple[int, int]] = []
        self._plain: list[int] = []
        self._odd: list[int] = []
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and id(leaf) in given:
                self._inputs.append((i, given[id(leaf)]))
            elif not isinstance(leaf, Tensor) or not clone:
                self._fixed.append((i, leaf))
            elif id(leaf) in first:
                self._again.append((i, first[id(leaf)]))
            else:
                first[id(leaf)] = i
                simple = leaf.layout is torch.strided and not (leaf.is_conj() or leaf.is_neg())
                (self._plain if simple and dense(leaf) else self._odd).append(i)
        self._sources = [self.leaves[i] for i in self._plain]
        self._shapes = [(x.shape, x.stride(), x.dtype, x.device) for x in self._sources]
        self._build = _builder(result, self._spec)
        self._single = len(self.leaves) == 1 and len(self._plain) == 1

    def hand_out(self, leaves: Any) -> Any:
        if self._single:
            return self._build([self._sources[0].clone()])
        results: list[Any] = [None] * len(self.leaves)
        if len(self._sources) == 1:
            results[self._plain[0]] = self._sources[0].clone()
        elif self._sources:
            fresh = [torch.empty_strided(s, t, dtype=d, device=p) for s, t, d, p in self._shapes]
            torch._foreach_copy_(fresh, self._sources)
            for i, tensor in zip(self._plain, fresh, strict=True):
                results[i] = tensor
        for i in self._odd:
            leaf = self.leaves[i]
            simple = leaf.layout is torch.strided and not (leaf.is_conj() or leaf.is_neg())
            results[i] = twin(leaf) if simple else leaf.clone()
        for i, leaf in self._fixed:
            results[i] = leaf
        for i, source in self._inputs:
            results[i] = leaves[source]
        for i, source in self._again:
            results[i] = results[source]
        return self._build(results)


def _builder(result: Any, spec: Any) -> Callable[[list[Any]], Any]:
    """From leaves to the result, without torch's pytree where the structure is shallow."""
    if isinstance(result, Tensor):
        return _first
    if type(result) in (tuple, list) and all(isinstance(x, _LEAF) for x in result):
        return type(result)
    if type(result) is dict and all(isinstance(x, _LEAF) for x in result.values()):
        names = list(result)
        return lambda leaves: dict(zip(names, leaves, strict=True))
    return lambda leaves: tree.unflatten(leaves, spec)


def _first(leaves: list[Any]) -> Any:
    return leaves[0]
