"""Any nesting of tensors, flat and back: torch's pytree, plus dataclasses, namespaces and kinds of dict, which it does not know."""

from __future__ import annotations

import dataclasses
import enum
import functools
import numbers
import types
from collections import OrderedDict, UserDict
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
    numbers.Number,
    range,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
    enum.Enum,
)


def _register(kind: type) -> None:
    """What is kept under keys, for a kind of dict, and under names, for that and for all others."""
    fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    base: Any = next(b for b in (OrderedDict, dict, types.SimpleNamespace, object) if issubclass(kind, b))

    def derived(name: str) -> bool:  # kept there by whoever reads it first, and as well made again
        return isinstance(getattr(kind, name, None), functools.cached_property)

    def held(value: Any) -> tuple[list[Any], list[str], bool]:  # with what is no field, as __post_init__ may set it
        own = getattr(value, "__dict__", {})
        one = own is value  # a dict whose items are its attributes
        names = [] if one else [*fields, *(n for n in own if n not in fields and not derived(n))]
        return list(base.keys(value)) if issubclass(base, dict) else [], names, one

    def flatten(value: Any) -> tuple[list[Any], Any]:
        keys, names, _ = context = held(value)
        return [*(base.__getitem__(value, k) for k in keys), *(getattr(value, n) for n in names)], context

    def unflatten(values: Any, context: Any) -> Any:
        keys, names, one = context
        new: Any = base.__new__(kind)
        given = iter(values)
        for key in keys:
            base.__setitem__(new, key, next(given))
        for name in names:
            object.__setattr__(new, name, next(given))
        if one:
            new.__dict__ = new
        return new

    def with_keys(value: Any) -> tuple[list[Any], Any]:
        values, context = flatten(value)
        words = [*map(pytree.MappingKey, context[0]), *map(pytree.GetAttrKey, context[1])]
        return list(zip(words, values, strict=True)), context

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


def _learn(leaves: list[Any]) -> bool:
    """Registers dataclasses, namespaces and kinds of dict among the leaves; whether there were any."""
    known = (dict, UserDict, types.SimpleNamespace)
    kinds = {type(x) for x in leaves if isinstance(x, known) or (dataclasses.is_dataclass(x) and not isinstance(x, type))}
    for kind in kinds:
        _register(kind)
    return bool(kinds)


def _whole(value: Any) -> bool:
    """A size stays one: torch's pytree would make a plain tuple of it."""
    return type(value) is torch.Size


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure. Dicts of any kind, lists, tuples, named tuples, dataclasses, namespaces, and whatever is registered with
    torch's pytree."""
    leaves, spec = pytree.tree_flatten(value, _whole)
    while _learn(leaves):
        leaves, spec = pytree.tree_flatten(value, _whole)
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
    found, _ = pytree.tree_flatten_with_path(value, _whole)
    return [("".join(map(_word, path)).lstrip(".") or root, leaf) for path, leaf in found]


def opaque(leaves: list[Any]) -> list[type]:
    """Types among the leaves that may hide tensors from us: containers that nobody registered, foreign objects."""
    return sorted({type(x) for x in leaves if not isinstance(x, PLAIN)}, key=lambda t: t.__qualname__)


def cloned(value: Any) -> Any:
    """The same structure with its tensors cloned."""
    leaves, spec = flatten(value)
    return unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves], spec)


def leafed(value: Any) -> Any:
    """The same structure with its tensors cloned and cut off from what made them; those that require gradients are leaves that do."""
    leaves, spec = flatten(value)
    return unflatten([x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves], spec)
