"""Everything in one forward that a graph cannot record, in one pass, each with the model's own line and its submodule.

On the emulated engine the forward is captured by a graph that collects refusals and goes on. On a device it runs eagerly under two
passive modes that ask the same table, with the calls that no mode sees, and streams and events, watched at torch.cuda. What kernels do
inside, only a device shows, and only while it captures: a library that launches on another stream is known by name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.judge.explain.calls import Call, Calls, Reason, replaced
from parity.judge.explain.streams import StreamWatch
from parity.runtime import rng
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.legality import WRONG_STREAM, call_violation, violation
from parity.runtime.source import user_line
from parity.runtime.state import kept

_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"})
_SEEN_THROUGH = ("aten", "prim", "prims")


@dataclass(frozen=True)
class Tour:
    """``model``: the module's class. ``root``: the call tree of the forward. ``reasons``: in order of first appearance, equal ones
    counted. ``unseen``: operations whose insides no mode sees. ``error``: what the forward raised where it did not end; what came
    after it is not known."""

    model: str
    root: Call
    reasons: tuple[Reason, ...]
    unseen: tuple[str, ...] = ()
    error: str = ""


def launches(func: Any) -> bool:
    """Whether an operation, as the dispatcher shows it, starts a kernel: no view, no allocation, no change of metadata."""
    schema = func._schema
    view = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return not (view or schema.name in _ALLOCATIONS or torch.Tag.inplace_view in func.tags)


def tour(region: Callable[..., Any], args: tuple[Any, ...], module: nn.Module, *, certifies: bool) -> Tour:
    """One forward, looked at; buffers and random streams are put back. ``certifies``: on a real device."""
    calls = Calls(module)

    met: list[Reason] = []

    def refused(refusal: CaptureRefused) -> None:
        met.append(Reason(refusal.cause, _what(refusal.message), refusal.where, calls.top.module))
        calls.top.own.append(met[-1])

    counting, streams, error = _Count(calls), rng.save(), ""
    look = _passive(refused) if certifies else _collecting(refused)
    try:
        with kept(module), look, counting, calls:
            try:
                region(*args)
            except Exception as raised:  # after a refusal the forward goes on with what eager gives, and eager may have to stop there
                error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    finally:
        rng.restore(streams)
    return Tour(type(module).__name__, calls.root, merged(met), tuple(sorted(counting.unseen)), error)


def merged(reasons: list[Reason]) -> tuple[Reason, ...]:
    """Equal causes on one line are one reason, met several times."""
    found: dict[tuple[str, str], Reason] = {}
    for reason in reasons:
        key = (reason.cause, reason.where)
        found[key] = replace(found[key], count=found[key].count + reason.count) if key in found else reason
    return tuple(found.values())


def _what(message: str) -> str:
    """A violation's own words, without the rule that all share."""
    head, colon, tail = message.partition(": ")
    return tail if colon and head.startswith(("not permitted while", "no copy between")) else message


class _Count(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self.unseen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace not in _SEEN_THROUGH:
            self.unseen.add(func.name())
        if launches(func) and any(isinstance(x, torch.Tensor) and on_device(x) for x in tree_leaves((args, kwargs, out))):
            self.calls.operation(user_line())
        return out


# ---------------------------------------------------------------- emulated
@contextmanager
def _collecting(refused: Callable[[CaptureRefused], None]) -> Iterator[None]:
    graph: Any = torch.cuda.CUDAGraph()
    graph.collect = refused
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        yield


# ---------------------------------------------------------------- a device
class _Operations(TorchDispatchMode):
    def __init__(self, refused: Callable[[CaptureRefused], None], streams: StreamWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused, self.streams = refused, streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (found := violation(func, args, kwargs, on_device)) is not None:
            self.refused(CaptureRefused(found.cause, found.what, user_line()))
        if (kernel := WRONG_STREAM.get(func._schema.name)) is not None:
            text = f"{func._schema.name} launches {kernel} on the legacy default stream"
            self.refused(CaptureRefused("side-stream", text, user_line()))
        if launches(func):
            self.streams.launch(func._schema.name, user_line())
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __init__(self, refused: Callable[[CaptureRefused], None]) -> None:
        super().__init__()
        self.refused = refused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (found := call_violation(func, args, kwargs or {}, on_device)) is not None:
            self.refused(CaptureRefused(found.cause, found.what, user_line()))
        return func(*args, **(kwargs or {}))


_HIDDEN = (
    ("", "synchronize", "torch.cuda.synchronize", "host-sync"),
    ("", "manual_seed", "a seed for a generator of the device", "rng"),
    ("", "manual_seed_all", "a seed for a generator of the device", "rng"),
    ("Stream", "synchronize", "Stream.synchronize", "host-sync"),
    ("Stream", "query", "Stream.query", "host-sync"),
    ("Event", "synchronize", "Event.synchronize", "host-sync"),
    ("Event", "query", "Event.query", "host-sync"),
    ("Event", "elapsed_time", "Event.elapsed_time", "host-sync"),
)
"""What waits for the device, or seeds it, and passes through neither mode: class in torch.cuda, function, words, cause."""


def _told(function: Any, name: str, cause: str, refused: Callable[[CaptureRefused], None]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        refused(CaptureRefused(cause, name, user_line()))
        return function(*args, **kwargs)

    return call


@contextmanager
def _passive(refused: Callable[[CaptureRefused], None]) -> Iterator[None]:
    streams = StreamWatch(refused)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), ExitStack() as stack:
        for kind, name, text, cause in _HIDDEN:
            owner = getattr(torch.cuda, kind) if kind else torch.cuda
            stack.enter_context(replaced(owner, name, _told(getattr(owner, name), text, cause, refused)))
        stack.enter_context(streams.entered())
        stack.enter_context(_Operations(refused, streams))
        stack.enter_context(_Functions(refused))
        yield
    torch.cuda.current_stream().wait_stream(stream)
