"""What goes into a graph and what comes out: static inputs with the caller's geometry, results that nobody else writes to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.runtime import tree

_LEAF = (Tensor, bool, int, float, complex, str, bytes, type(None))
_SINGLY = 2
"""So many tensors are cloned one by one, more of them at once. On an H200 the host spends 11 microseconds on one clone, 31 on two
allocations and one copy of both, 56 on seven."""
_CLONES: Callable[[list[Tensor]], Sequence[Tensor]] | None = getattr(torch, "_foreach_clone", None)


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
        self._put = self._targets[0].copy_ if len(self._targets) == 1 else None

    def fill(self, leaves: Any) -> None:
        if self._put is not None:
            self._put(leaves[self._plain[0]])
        elif self._targets:
            torch._foreach_copy_(self._targets, [leaves[i] for i in self._plain])
        for position in self._odd:
            flat(self.leaves[position]).copy_(flat(leaves[position]))

    def pieces(self) -> list[tuple[int, Tensor]]:
        """Positions and static tensors, where a copy of bytes from one of the same geometry fills each; else none at all."""
        if self._odd or not all(map(dense, self._targets)):
            return []
        return list(zip(self._plain, self._targets, strict=True))


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
        self._build = _builder(result, self._spec)
        whole = bool(self._plain) and len(self._plain) == len(self.leaves)
        self._only = self._sources[0].clone if whole and isinstance(result, Tensor) else None
        self.assemble: Callable[[Sequence[Any]], Any] | None = self._build if whole else None
        """The result from copies of all ``pieces``, where those are all there is to it."""

    def pieces(self, foreign: set[int]) -> list[Tensor]:
        """Static tensors, where a copy of its bytes is a clone of each; else none at all. ``foreign``: addresses of tensors that are
        not the graph's own: whoever owns such a one may give it other memory, which a clone follows."""
        simple = all(
            type(x) is Tensor and not (x.is_quantized or x.requires_grad) and x.data_ptr() not in foreign for x in self._sources
        )
        return list(self._sources) if simple else []

    def hand_out(self, leaves: Any, fresh: Sequence[Tensor] = ()) -> Any:
        """``leaves``: of the call. ``fresh``: copies of ``pieces``, where they are made already."""
        if self._only is not None:
            return fresh[0] if fresh else self._only()
        fresh = fresh or self._clones()
        if self.assemble is not None:
            return self.assemble(fresh)
        results: list[Any] = [None] * len(self.leaves)
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

    def _clones(self) -> Sequence[Tensor]:
        """Each in memory of its own. Views of one block were measured: building them costs more than the allocations they spare, they
        would share what a caller saves, and those that autograd knows as views refuse to be written to."""
        sources = self._sources
        if len(sources) <= _SINGLY:
            return [source.clone() for source in sources]
        if _CLONES is not None:
            return _CLONES(sources)
        fresh = list(map(torch.empty_like, sources))  # dense ones keep their strides
        torch._foreach_copy_(fresh, sources)
        return fresh


def _builder(result: Any, spec: Any) -> Callable[[Sequence[Any]], Any]:
    """From leaves to the result. For tuples, lists and dicts an expression is compiled: torch's pytree takes longer than the copies."""
    keys: dict[str, Any] = {}
    expression = _expression(result, itertools.count(), keys)
    if not expression:
        return lambda leaves: tree.unflatten(list(leaves), spec)
    build: Callable[[Sequence[Any]], Any] = eval(f"lambda leaves: {expression}", keys)  # of nothing but indices and names made here
    return build


def _expression(value: Any, places: Iterator[int], keys: dict[str, Any]) -> str:
    """Python for ``value`` with ``leaves`` in place of its leaves; empty where some container is not exactly a tuple, list or dict.
    ``keys``: receives those of its dicts by the names that stand for them."""
    if isinstance(value, _LEAF):
        return f"leaves[{next(places)}]"
    kind = type(value)
    if kind not in (tuple, list, dict):
        return ""
    parts = [_expression(child, places, keys) for child in (value.values() if kind is dict else value)]
    if not all(parts):
        return ""
    if kind is dict:
        names = [f"key{len(keys) + i}" for i in range(len(value))]
        keys.update(zip(names, value, strict=True))
        return f"{{{', '.join(map('{}: {}'.format, names, parts))}}}"
    if kind is tuple:
        return f"({''.join(f'{part}, ' for part in parts)})"
    return f"[{', '.join(parts)}]"
