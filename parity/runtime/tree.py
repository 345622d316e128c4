"""Any nesting of tensors, flat and back: torch's pytree, plus dataclasses, which it does not know by itself."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

PLAIN = (
    Tensor,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
    enum.Enum,
)


def _register(kind: type) -> None:
    names = [f.name for f in dataclasses.fields(kind)]

    def derived(name: str) -> bool:  # kept there by whoever reads it first, and as well made again
        return isinstance(getattr(kind, name, None), functools.cached_property)

    def held(value: Any) -> list[str]:  # with what is no field, as __post_init__ may set it
        return [*names, *(n for n in getattr(value, "__dict__", ()) if n not in names and not derived(n))]

    def flatten(value: Any) -> tuple[list[Any], Any]:
        every = held(value)
        return [getattr(value, n) for n in every], every

    def unflatten(values: Any, every: Any) -> Any:
        new: Any = object.__new__(kind)
        for name, value in zip(every, values, strict=True):
            object.__setattr__(new, name, value)
        return new

    def with_keys(value: Any) -> tuple[list[Any], Any]:
        every = held(value)
        return [(pytree.GetAttrKey(n), getattr(value, n)) for n in every], every

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


def _learn(leaves: list[Any]) -> bool:
    """Registers the dataclasses among the leaves; whether there were any."""
    kinds = {type(x) for x in leaves if dataclasses.is_dataclass(x) and not isinstance(x, type)}
    for kind in kinds:
        _register(kind)
    return bool(kinds)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure. Dicts, lists, tuples, named tuples, dataclasses and whatever is registered with torch's pytree."""
    leaves, spec = pytree.tree_flatten(value)
    while _learn(leaves):
        leaves, spec = pytree.tree_flatten(value)
    return leaves, spec


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def alike(value: Any, leaves: list[Any], spec: pytree.TreeSpec) -> bool:
    """Whether a value still is of these very leaves."""
    found, shape = flatten(value)
    return shape == spec and all(a is b for a, b in zip(found, leaves, strict=True))


def _word(key: Any) -> str:
    if isinstance(key, pytree.SequenceKey):
        return f"[{key.idx}]"
    return f".{key.key}" if isinstance(key, pytree.MappingKey) else f".{getattr(key, 'name', key)}"


def paths(value: Any, root: str = "output") -> list[tuple[str, Any]]:
    """(path, leaf) for every leaf: ``predictions``, ``x8.features``, ``[0][2]``; a single leaf is called ``root``."""
    flatten(value)
    found, _ = pytree.tree_flatten_with_path(value)
    return [("".join(map(_word, path)).lstrip(".") or root, leaf) for path, leaf in found]


def opaque(leaves: list[Any]) -> list[type]:
    """Types among the leaves that may hide tensors from us: containers that nobody registered, foreign objects."""
    return sorted({type(x) for x in leaves if not isinstance(x, PLAIN)}, key=lambda t: t.__qualname__)


def cloned(value: Any) -> Any:
    """The same structure with its tensors cloned."""
    leaves, spec = flatten(value)
    return unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves], spec)
