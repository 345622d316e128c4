"""One eager call op by op, as far as a graph would hold it fixed: for telling causes apart, never for judging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.judge.explain.streams import StreamWatch
from parity.judge.explain.tour import launches
from parity.runtime import tree
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.source import user_line
from parity.runtime.state import data_of
from parity.runtime.within import body_of

_LITERAL = torch.ops.aten.lift_fresh.default
"""What is handed Python's values, just put into a tensor: they are scalars of the call."""
_HOST_LIMIT = 4096


@dataclass
class Script:
    """One traced call: per op its name, its shapes, its scalars, the values it reads on the host, and those of them that the call did
    not make (``state``); storages read that the call did not make, storages made, storages ``used`` per op, and ``results`` in words,
    a tensor only as that."""

    names: list[str] = field(default_factory=list)
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    scalars: list[tuple[Any, ...]] = field(default_factory=list)
    hosts: list[tuple[Any, ...]] = field(default_factory=list)
    state: list[tuple[Any, ...]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    read: dict[int, str] = field(default_factory=dict)
    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    used: list[tuple[int, ...]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    def __init__(self, streams: StreamWatch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.script = Script()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        script, line = self.script, user_line()
        leaves = tree_leaves((args, kwargs or {}))
        used = [x.untyped_storage()._cdata for x in leaves if isinstance(x, Tensor)]
        for key in used:
            if key not in script.made:
                script.read.setdefault(key, line)
        hosts = [x for x in leaves if isinstance(x, Tensor) and not on_device(x)]
        kept = tuple(_values(x) for x in hosts if x.untyped_storage()._cdata not in script.made)
        read = tuple(map(_values, hosts))
        scalars = tuple(repr(x) for x in leaves if not isinstance(x, Tensor))
        if func is _LITERAL:
            kept, read, scalars = (), (), (*scalars, *map(repr, read))
            script.read.pop(leaves[0].untyped_storage()._cdata, None)
        if (body := body_of(func)) is None:
            out = func(*args, **(kwargs or {}))
        else:
            with self:
                out = body(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if self._streams is not None and launches(func) and any(map(on_device, results)):
            self._streams.launch(func.name(), line)
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage._cdata not in script.read:
                script.made[storage._cdata] = StorageWeakRef(storage)
        script.names.append("torch.tensor" if func is _LITERAL else func.name())
        script.shapes.append(tuple(tuple(t.shape) for t in results))
        script.scalars.append(scalars)
        script.hosts.append(read)
        script.state.append(kept)
        script.used.append(tuple(used))
        script.lines.append(line)
        return out


def _values(tensor: Tensor) -> Any:
    """The bytes of a small host tensor; of a large one only how many there are."""
    if tensor.layout is not torch.strided or tensor.numel() > _HOST_LIMIT:
        return tensor.numel()
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call, unused-ignore]
        return tensor.tolist() if tensor.numel() < 5 else bytes(data_of(tensor).tolist())


def traced(forward: Callable[..., Any], args: tuple[Any, ...], streams: StreamWatch | None = None) -> tuple[Script, Any]:
    """One call, and what it returned. ``streams``: is told of every launch."""
    recorder = _Recorder(streams)
    with recorder:
        out = forward(*args)
    recorder.script.outputs = {t.untyped_storage()._cdata for t in tree_leaves(out) if isinstance(t, Tensor)}
    recorder.script.results = ["a tensor" if isinstance(x, Tensor) else repr(x) for x in tree.flatten(out)[0]]
    return recorder.script, out


def on_a_stream(forward: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Script, Any, list[CaptureRefused]]:
    """One call on a stream of its own, as a capture has it, with what no capture of it could join."""
    told: list[CaptureRefused] = []
    streams, stream = StreamWatch(told.append), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), streams.entered():
        script, out = traced(forward, args, streams)
    torch.cuda.current_stream().wait_stream(stream)
    return script, out, told
