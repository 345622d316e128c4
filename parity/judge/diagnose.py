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

from parity.judge.subject import Bench
from parity.runtime.engine import on_device
from parity.runtime.liveness import held_tensors
from parity.runtime.source import user_line
from parity.runtime.state import data_of

_COUNTED = {"names": "python-counter", "scalars": "python-counter", "shapes": "python-counter", "hosts": "host-state"}
_DECIDED = {"names": "python-branch", "shapes": "python-branch", "scalars": "stale-constant", "hosts": "stale-constant"}
_CALLED = {"hosts": "values of a host tensor read by"}
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
    """One traced call: per op its name, its shapes, its scalars and the values it reads on the host; storages read that the call did
    not make, storages made."""

    names: list[str] = field(default_factory=list)
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    scalars: list[tuple[Any, ...]] = field(default_factory=list)
    hosts: list[tuple[Any, ...]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    read: dict[int, str] = field(default_factory=dict)
    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.script = _Script()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        script, line = self.script, user_line()
        leaves = tree_leaves((args, kwargs or {}))
        for tensor in leaves:
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in script.made:
                script.read.setdefault(key, line)
        hosts = tuple(_values(x) for x in leaves if isinstance(x, Tensor) and not on_device(x))
        out = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage._cdata not in script.read:
                script.made[storage._cdata] = StorageWeakRef(storage)
        script.names.append(func.name())
        script.shapes.append(tuple(tuple(t.shape) for t in results))
        script.scalars.append(tuple(repr(x) for x in leaves if not isinstance(x, Tensor)))
        script.hosts.append(hosts)
        script.lines.append(line)
        return out


def _values(tensor: Tensor) -> Any:
    """The bytes of a small host tensor; of a large one only how many there are."""
    if tensor.layout is not torch.strided or tensor.numel() > _HOST_LIMIT:
        return tensor.numel()
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call, unused-ignore]
        return tensor.tolist() if tensor.numel() < 5 else bytes(data_of(tensor).tolist())


def _traced(forward: Callable[..., Any], args: tuple[Any, ...]) -> tuple[_Script, Any]:
    recorder = _Recorder()
    with recorder:
        out = forward(*args)
    recorder.script.outputs = {t.untyped_storage()._cdata for t in tree_leaves(out) if isinstance(t, Tensor)}
    return recorder.script, out


def _first(mine: list[Any], theirs: list[Any]) -> int | None:
    if mine == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)) - 1)


def _apart(mine: _Script, theirs: _Script, causes: dict[str, str]) -> Finding | None:
    for what, cause in causes.items():
        place = _first(getattr(mine, what), getattr(theirs, what))
        if place is not None:
            called = _CALLED.get(what, f"{what} of")
            text = (
                f"the {called} {mine.names[place]} differ: {getattr(mine, what)[place]} and {getattr(theirs, what)[place : place + 1]}"
            )
            return Finding(cause, mine.lines[place], text)
    return None


def plain(module: nn.Module) -> dict[str, str]:
    """Path to text of what a module's attributes hold that is no tensor: numbers, words, and containers of them."""
    found: dict[str, str] = {}
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if not (key.startswith("_") and key in _OWN):
                _write(f"{name}.{key}".lstrip("."), value, _DEPTH, found)
    return found


def _write(path: str, value: Any, left: int, found: dict[str, str]) -> None:
    if isinstance(value, (bool, int, float, complex, str, type(None))):
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
    scripts, outputs, held, holders = [], [], [], []
    for probe in ("A",) * (1 + _EQUAL_CALLS) + ("B",):  # the first call fills what is built lazily
        script, out = _traced(forward, bench.args(probe))
        scripts.append(script)
        outputs.append(out)  # kept alive: an address handed out again would look like an old one
        held.append(plain(subject.module))
        holders.append(_holders(subject.module))
    _, *equal, last, other = scripts
    for before, after in pairwise([*equal, last]):
        if (found := _apart(before, after, _COUNTED)) is not None:
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
    found = _apart(scripts[0], scripts[1], _COUNTED)
    if found is None:
        return Finding("nondeterministic-kernel")
    return replace(found, detail=f"a second model, built alike, runs otherwise: {found.detail}")
