"""Why a replay is wrong: by experiment, on an eager module. Tracing never judges parity; it only tells causes apart.

The forward is traced on probe A twice and on B. What differs between two equal calls was counted in Python; what differs between the
probes was decided there; and a call that reads what an earlier call made depends on memory that a graph does not renew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.judge.subject import Bench
from parity.runtime.source import user_line

_COUNTED = {"names": "python-counter", "scalars": "python-counter", "shapes": "python-counter"}
_DECIDED = {"names": "python-branch", "shapes": "python-branch", "scalars": "stale-constant"}


@dataclass(frozen=True)
class Finding:
    cause: str
    where: str = ""
    detail: str = ""


@dataclass
class _Script:
    """One traced call: per op its name, its shapes and its scalars; storages read that the call did not make, storages made."""

    names: list[str] = field(default_factory=list)
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    scalars: list[tuple[Any, ...]] = field(default_factory=list)
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
        out = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage._cdata not in script.read:
                script.made[storage._cdata] = StorageWeakRef(storage)
        script.names.append(func.name())
        script.shapes.append(tuple(tuple(t.shape) for t in results))
        script.scalars.append(tuple(repr(x) for x in leaves if not isinstance(x, Tensor)))
        script.lines.append(line)
        return out


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
            text = (
                f"the {what} of {mine.names[place]} differ: {getattr(mine, what)[place]} and {getattr(theirs, what)[place : place + 1]}"
            )
            return Finding(cause, mine.lines[place], text)
    return None


def diagnose(bench: Bench) -> Finding:
    """The cause of a wrong replay as far as an eager module shows it; ``unknown`` otherwise."""
    subject = bench.build()
    forward = subject.compose(subject.region)
    scripts, outputs = [], []
    for probe in ("A", "A", "A", "B"):  # the first call fills what is built lazily
        script, out = _traced(forward, bench.args(probe))
        scripts.append(script)
        outputs.append(out)  # kept alive: an address handed out again would look like an old one
    _, again, third, other = scripts
    found = _apart(again, third, _COUNTED) or _apart(third, other, _DECIDED)
    if found is not None:
        return found
    for key, line in third.read.items():
        if key in again.made:
            if key in again.outputs:
                return Finding("output-aliasing", line, "a call reads what an earlier call returned")
            return Finding("stale-address", line, "a call reads a tensor that an earlier call made and put in another's place")
    return Finding("unknown")


def diagnose_between(bench: Bench) -> Finding:
    """The cause of a replay that went wrong after ``between(module)``: what it changed in Python, which a graph holds fixed."""
    if bench.family.between is None:
        return Finding("unknown")
    subject = bench.build()
    forward = subject.compose(subject.region)
    _traced(forward, bench.args("A"))
    before, _ = _traced(forward, bench.args("A"))
    bench.family.between(subject.module)
    after, _ = _traced(forward, bench.args("A"))
    return _apart(after, before, _DECIDED) or Finding("unknown")
