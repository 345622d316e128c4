"""Why a replay is wrong: by experiment, on an eager module. Tracing never judges parity; it only tells causes apart.

The forward is traced on probe A several times and on B. What differs between two equal calls was counted in Python, or kept in a tensor
on the host; what differs between the probes was decided there; and a call that reads what an earlier call made depends on memory that a
graph does not renew. What Python holds of it is named by its attribute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.judge.explain.streams import StreamWatch
from parity.judge.explain.tour import launches
from parity.judge.subject import Bench
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.liveness import held_tensors
from parity.runtime.source import user_line
from parity.runtime.state import data_of

_COUNTED = {"names": "python-counter", "scalars": "python-counter", "shapes": "python-counter", "hosts": "host-state"}
_DECIDED = {"names": "python-branch", "shapes": "python-branch", "scalars": "stale-constant", "hosts": "stale-constant"}
_CALLED = dict.fromkeys(("hosts", "state"), "values of a host tensor read by")
_LITERAL = torch.ops.aten.lift_fresh.default
"""What is handed Python's values, just put into a tensor: they are scalars of the call."""
_EQUAL_CALLS = 5
"""As many as an arm makes before it is judged to repeat itself: what changes path at the fifth call is found too."""
_HOST_LIMIT = 4096
_DEPTH = 3
_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Finding:
    cause: str
    where: str = ""
    detail: str = ""


@dataclass
class _Script:
    """One traced call: per op its name, its shapes, its scalars, the values it reads on the host, and those of them that the call did
    not make (``state``); storages read that the call did not make, storages made."""

    names: list[str] = field(default_factory=list)
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    scalars: list[tuple[Any, ...]] = field(default_factory=list)
    hosts: list[tuple[Any, ...]] = field(default_factory=list)
    state: list[tuple[Any, ...]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    read: dict[int, str] = field(default_factory=dict)
    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)


class _Recorder(TorchDispatchMode):
    def __init__(self, streams: StreamWatch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.script = _Script()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        script, line = self.script, user_line()
        leaves = tree_leaves((args, kwargs or {}))
        for tensor in leaves:
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in script.made:
                script.read.setdefault(key, line)
        hosts = [x for x in leaves if isinstance(x, Tensor) and not on_device(x)]
        kept = tuple(_values(x) for x in hosts if x.untyped_storage()._cdata not in script.made)
        read = tuple(map(_values, hosts))
        scalars = tuple(repr(x) for x in leaves if not isinstance(x, Tensor))
        if func is _LITERAL:
            kept, read, scalars = (), (), (*scalars, *map(repr, read))
            script.read.pop(leaves[0].untyped_storage()._cdata, None)
        out = func(*args, **(kwargs or {}))
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
        script.lines.append(line)
        return out


def _values(tensor: Tensor) -> Any:
    """The bytes of a small host tensor; of a large one only how many there are."""
    if tensor.layout is not torch.strided or tensor.numel() > _HOST_LIMIT:
        return tensor.numel()
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call, unused-ignore]
        return tensor.tolist() if tensor.numel() < 5 else bytes(data_of(tensor).tolist())


def _traced(forward: Callable[..., Any], args: tuple[Any, ...], streams: StreamWatch | None = None) -> tuple[_Script, Any]:
    recorder = _Recorder(streams)
    with recorder:
        out = forward(*args)
    recorder.script.outputs = {t.untyped_storage()._cdata for t in tree_leaves(out) if isinstance(t, Tensor)}
    return recorder.script, out


def _on_a_stream(forward: Callable[..., Any], args: tuple[Any, ...]) -> tuple[_Script, Any, list[CaptureRefused]]:
    """One call on a stream of its own, as a capture has it, with what no capture of it could join."""
    told: list[CaptureRefused] = []
    streams, stream = StreamWatch(told.append), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), streams.entered():
        script, out = _traced(forward, args, streams)
    torch.cuda.current_stream().wait_stream(stream)
    return script, out, told


def _first(mine: list[Any], theirs: list[Any]) -> int | None:
    """The first place where they differ; where one goes on after the other's end, that end."""
    if mine == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


def _apart(mine: _Script, theirs: _Script, causes: dict[str, str]) -> Finding | None:
    for what, cause in causes.items():
        one, other = getattr(mine, what), getattr(theirs, what)
        place = _first(one, other)
        if place is None:
            continue
        if place >= min(len(one), len(other)):
            longer = mine if len(one) > len(other) else theirs
            return Finding(cause, longer.lines[place], f"one call ends where another goes on with {longer.names[place]}")
        called = "operations" if what == "names" else f"{_CALLED.get(what, f'{what} of')} {mine.names[place]}"
        return Finding(cause, mine.lines[place], f"the {called} differ: {one[place]} and {other[place]}")
    return None


def _counted(mine: _Script, theirs: _Script) -> Finding | None:
    """What differs between two equal calls. A host tensor that outlives a call and was read with another value before anything else
    changed is the origin of the rest."""
    found = _apart(mine, theirs, _COUNTED)
    place = _first(mine.state, theirs.state)
    others = [_first(getattr(mine, what), getattr(theirs, what)) for what in ("names", "scalars", "shapes")]
    if found is None or place is None or any(other is not None and other <= place for other in others):
        return found
    return _apart(mine, theirs, {"state": "host-state"})


def plain(module: nn.Module) -> dict[str, str]:
    """Path to text of what a module's attributes hold that is no tensor: numbers, words, NumPy's arrays, and containers of them."""
    found: dict[str, str] = {}
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if not (key.startswith("_") and key in _OWN):
                _write(f"{name}.{key}".lstrip("."), value, _DEPTH, found)
    return found


def _write(path: str, value: Any, left: int, found: dict[str, str]) -> None:
    if isinstance(value, (bool, int, float, complex, str, type(None))) or type(value).__module__ == "numpy":
        found[path] = repr(value)[:80]
    elif isinstance(value, dict) and left:
        for key, item in value.items():
            _write(f"{path}[{key!r}]", item, left - 1, found)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        found[path] = f"{len(value)} entries"
        for place, item in enumerate(value if left and isinstance(value, (list, tuple, deque)) else ()):
            _write(f"{path}[{place}]", item, left - 1, found)


def _moved(before: dict[str, str], after: dict[str, str]) -> str:
    """The first attribute that a call changed, as the end of a sentence; empty where none did."""
    for path in (*after, *before):
        if before.get(path) != after.get(path):
            return f"; attribute {path} went from {before.get(path, 'nothing')} to {after.get(path, 'nothing')}"
    return ""


def _holders(module: nn.Module) -> dict[int, str]:
    """Storage to the attribute or buffer that holds it, as the end of a sentence."""
    named = [*held_tensors(module), *module.named_buffers()]
    return {t.untyped_storage()._cdata: f", held as {path}" for path, t in named if t.layout is torch.strided}


def diagnose(bench: Bench) -> Finding:
    """The cause of a wrong replay as far as an eager module shows it; ``unknown`` otherwise."""
    subject = bench.build()
    forward = subject.compose(subject.region)
    scripts: list[_Script] = []
    outputs, held, holders = [], [], []
    strayed: list[CaptureRefused] = []
    for probe in ("A",) * (1 + _EQUAL_CALLS) + ("B",):  # the first call fills what is built lazily
        if scripts:
            script, out = _traced(forward, bench.args(probe))
        else:
            script, out, strayed = _on_a_stream(forward, bench.args(probe))
        scripts.append(script)
        outputs.append(out)  # kept alive: an address handed out again would look like an old one
        held.append(plain(subject.module))
        holders.append(_holders(subject.module))
    if strayed:
        return Finding("side-stream", strayed[0].where, strayed[0].message)
    _, *equal, last, other = scripts
    for before, after in pairwise([*equal, last]):
        if (found := _counted(before, after)) is not None:
            return replace(found, detail=found.detail + _moved(held[2], held[3]))
    if (found := _apart(last, other, _DECIDED)) is not None:
        return found
    before = equal[-1]
    for key, line in last.read.items():
        if key in before.made:
            holder = holders[_EQUAL_CALLS - 1].get(key, "")
            if key in before.outputs:
                return Finding("output-aliasing", line, f"a call reads what an earlier call returned{holder}")
            return Finding("stale-address", line, f"a call reads a tensor that an earlier call made and put in another's place{holder}")
    return Finding("unknown")


def diagnose_between(bench: Bench) -> Finding:
    """The cause of a replay that went wrong after ``between(module)``: a tensor of an earlier call that it dropped, at whose address a
    graph goes on reading, or what it changed in Python, which a graph holds fixed."""
    if bench.family.between is None:
        return Finding("unknown")
    subject = bench.build()
    forward = subject.compose(subject.region)
    first, _ = _traced(forward, bench.args("A"))
    before, _ = _traced(forward, bench.args("A"))
    held = plain(subject.module)
    bench.family.between(subject.module)
    for key, line in before.read.items():
        if key in first.made and first.made[key].expired():
            return Finding("stale-address", line, "a call reads a tensor that an earlier call made, and that is dropped between calls")
    moved = _moved(held, plain(subject.module))
    after, _ = _traced(forward, bench.args("A"))
    found = _apart(after, before, _DECIDED)
    return Finding("unknown") if found is None else replace(found, detail=found.detail + moved)


def diagnose_noise(bench: Bench) -> Finding:
    """Why two eager sequences differ: a call that runs other operations on a second, equal build follows state that outlives a build
    (a global, a cache, a closure); else the kernels themselves are at fault."""
    scripts = []
    for _ in range(2):
        subject = bench.build()
        forward = subject.compose(subject.region)
        _traced(forward, bench.args("A"))
        scripts.append(_traced(forward, bench.args("A"))[0])
    found = _counted(*scripts)
    if found is None:
        return Finding("nondeterministic-kernel")
    return replace(found, detail=f"a second model, built alike, runs otherwise: {found.detail}")
