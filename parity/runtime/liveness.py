"""What a region reads but does not own.

A CUDA graph holds addresses, not tensors. Whatever a region reads and neither was given nor allocates itself must outlive the graph:
parameters and buffers (their module keeps them), and *derived* tensors, kept by some cache that may drop them at any time.

Traced on an eager call, never during a capture. Out of sight: what custom kernels, compiled regions and library workspaces read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.runtime.engine import on_device
from parity.runtime.legality import Violation, call_violation, violation
from parity.runtime.source import user_line

_SEEN_THROUGH = ("aten", "prim", "prims")


@dataclass
class Read:
    """One storage that a region read without having made it. ``path``: the module attribute that holds it, where one does.

    ``address`` and ``nbytes`` are the storage's; ``shape`` and ``dtype`` those of the first tensor seen on it.
    ``suspected``: the call made it and it outlived the call, so that a later one may read it; nobody saw it read.
    """

    reference: StorageWeakRef
    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str
    path: str = ""
    suspected: bool = False

    @property
    def dead(self) -> bool:
        return bool(self.reference.expired())

    def __str__(self) -> str:
        name = self.path or "a tensor that no module holds"
        what = "made" if self.suspected else "first read"
        return f"{name} {tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}, {what} at {self.where or 'an unknown line'}"


@dataclass
class Trace:
    """``reads``: derived ones, device storages only. ``violations``: what a capture would refuse, with the user's line, in order.
    ``written``: positions of inputs that the region wrote to. ``unseen``: ops whose insides tracing cannot see. ``aside``: lines that
    ran on another stream than the call began on."""

    result: Any = None
    reads: list[Read] = field(default_factory=list)
    violations: list[tuple[Violation, str]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    random: bool = False
    aside: set[str] = field(default_factory=set)


def storage_of(tensor: Tensor) -> Any:
    return tensor.untyped_storage() if tensor.layout is torch.strided and not tensor.is_nested else None


class _Ops(TorchDispatchMode):
    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, Read] = {}
        self.foreign: dict[int, Read] = {}
        self.violations: list[tuple[Violation, str]] = []
        self.inputs = {s._cdata: i for i, t in enumerate(inputs) if (s := storage_of(t)) is not None}
        self.written: set[int] = set()
        self.unseen: set[str] = set()
        self.random = False
        self.aside: set[str] = set()
        self._stream = torch.cuda.current_stream() if any(map(on_device, inputs)) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line = user_line()
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in tensors:
            if on_device(tensor) and (storage := storage_of(tensor)) is not None:
                key = storage._cdata
                if key not in self.made and key not in self.foreign:
                    self.foreign[key] = _read(tensor, storage, line)
        if (found := violation(func, args, kwargs, on_device)) is not None:
            self.violations.append((found, line))
        self._writes(func, args, kwargs)
        if self._stream is not None and torch.cuda.current_stream() != self._stream:
            self.aside.add(line)
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace not in _SEEN_THROUGH:
            self.unseen.add(func.name())
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := storage_of(tensor)) is not None and storage._cdata not in self.foreign:
                self.made[storage._cdata] = _read(tensor, storage, line)
        return out

    def _writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in written(func, args, kwargs):
            if (storage := storage_of(tensor)) is not None and storage._cdata in self.inputs:
                self.written.add(self.inputs[storage._cdata])


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes to, as its schema says."""
    if not func._schema.is_mutable:
        return []
    places = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    values = [args[position] if position < len(args) else kwargs.get(name) for position, name in places]
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


class Guarded(TorchDispatchMode):
    """Puts tensors back that are written to within it, through whatever alias. ``found``: by name, with their values before."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {s._cdata: (name, t) for name, t in tensors if (s := storage_of(t)) is not None}
        self.found: dict[str, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written(func, args, kwargs or {}):
            storage = storage_of(tensor)
            if storage is not None and (known := self._names.get(storage._cdata)) is not None and known[0] not in self.found:
                self.found[known[0]] = known[1], known[1].detach().clone()
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for tensor, before in self.found.values():
            tensor.data.copy_(before)


class _Calls(TorchFunctionMode):
    """Sees what the dispatcher shows under another name, or not at all: tolist, numpy, literals made on the device."""

    def __init__(self, ops: _Ops) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (found := call_violation(func, args, kwargs, on_device)) is not None:
            self.ops.violations.append((found, user_line()))
        return func(*args, **kwargs)


def _read(tensor: Tensor, storage: Any, where: str) -> Read:
    return Read(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes(), tuple(tensor.shape), tensor.dtype, where)


def held_tensors(module: torch.nn.Module, depth: int = 4) -> list[tuple[str, Tensor]]:
    """(path, tensor) for every tensor reachable through a module's attributes that is neither parameter nor buffer."""
    found: list[tuple[str, Tensor]] = []
    seen: set[int] = set()
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                _walk(f"{name}.{key}".lstrip("."), value, depth, found, seen)
    return found


def _walk(path: str, value: Any, left: int, found: list[tuple[str, Tensor]], seen: set[int]) -> None:
    # no closure: one that calls itself is a cycle, and would keep the tensors it found alive until the next garbage collection
    if isinstance(value, Tensor):
        found.append((path, value))
    elif left and isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _walk(f"{path}[{key!r}]" if not isinstance(key, int) else f"{path}[{key}]", item, left - 1, found, seen)


def owned_storages(module: torch.nn.Module | None) -> set[int]:
    """Identities of the storages of a module's parameters and buffers."""
    if module is None:
        return set()
    return {s._cdata for t in [*module.parameters(), *module.buffers()] if (s := storage_of(t)) is not None}


def trace(region: Callable[..., Any], args: Iterable[Any], module: torch.nn.Module | None = None) -> Trace:
    """Runs ``region(*args)`` eagerly and reports what it read, wrote and did that a capture would refuse.

    Derived reads are the device storages that were there before, and those made during the call that outlive it (a cache that each
    call renews is read by the next one), inputs, parameters and buffers of ``module`` aside.
    """
    values = list(args)
    inputs = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    ops = _Ops(inputs)
    with ops, _Calls(ops):
        result = region(*values)
    given = owned_storages(module) | set(ops.inputs)
    outputs = {s._cdata for t in tree_leaves(result) if isinstance(t, Tensor) and (s := storage_of(t)) is not None}
    paths = {s._cdata: p for p, t in (held_tensors(module) if module else ()) if (s := storage_of(t)) is not None}
    reads = {key: read for key, read in ops.foreign.items() if key not in given}
    for key, read in ops.made.items():
        if key not in given and key not in outputs:
            reads[key] = read
            read.suspected = True
    for key, read in reads.items():
        read.path = paths.get(key, "")
    alive = [read for read in reads.values() if not read.dead]  # what died within the call is read by no later one
    return Trace(result, alive, ops.violations, sorted(ops.written), sorted(ops.unseen), ops.random, ops.aside)


def hold(reads: Iterable[Read]) -> list[Any]:
    """Strong references to the storages of ``reads`` that still live: as long as somebody holds them, a graph may read them."""
    held = []
    for read in reads:
        storage = torch.UntypedStorage._new_with_weak_ptr(read.reference.cdata)
        if storage is not None:
            held.append(storage)
    return held
