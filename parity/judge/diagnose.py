"""Why a replay is wrong: by experiment, on an eager module. Tracing never judges parity; it only tells causes apart.

The forward is traced on probe A several times and on B. What differs between two equal calls was counted in Python, or kept in a tensor
on the host; what differs between the probes was decided there; and a call that reads what an earlier call made depends on memory that a
graph does not renew. What Python holds of it is named by its attribute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from parity.judge.subject import Bench
from parity.judge.traced import Script, on_a_stream, traced
from parity.runtime.errors import CaptureRefused
from parity.runtime.liveness import held_tensors

_COUNTED = {"names": "python-counter", "scalars": "python-counter", "shapes": "python-counter", "hosts": "host-state"}
_DECIDED = {"names": "python-branch", "shapes": "python-branch", "scalars": "stale-constant", "hosts": "stale-constant"}
_CALLED = dict.fromkeys(("hosts", "state"), "values of a host tensor read by")
_EQUAL_CALLS = 5
"""As many as an arm makes before it is judged to repeat itself: what changes path at the fifth call is found too."""
_DEPTH = 3
_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Finding:
    cause: str
    where: str = ""
    detail: str = ""


def _first(mine: list[Any], theirs: list[Any]) -> int | None:
    """The first place where they differ; where one goes on after the other's end, that end."""
    if mine == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


def _apart(mine: Script, theirs: Script, causes: dict[str, str]) -> Finding | None:
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


def _handed_out(mine: Script, theirs: Script, value: str, count: str) -> Finding | None:
    """Results that are no tensors, and how many there are."""
    place = _first(mine.results, theirs.results)
    if place is None:
        return None
    if len(mine.results) != len(theirs.results):
        return Finding(count, "", f"one call returns {len(mine.results)} leaves and another {len(theirs.results)}")
    return Finding(
        value, "", f"leaf {place} of the results is {theirs.results[place]:.80} in one call and {mine.results[place]:.80} in another"
    )


def _elsewhere(mine: Script, theirs: Script, named: dict[int, str], cause: str) -> Finding | None:
    """Calls that do the same, with other weights."""
    for place, (one, other) in enumerate(zip(mine.used, theirs.used, strict=False)):
        for a, b in zip(one, other, strict=False):
            if a != b and a in named and b in named:
                return Finding(cause, mine.lines[place], f"{mine.names[place]} reads {named[b]} in one call and {named[a]} in another")
    return None


def _by_object(bench: Bench, forward: Callable[..., Any]) -> Finding | None:
    """A call that goes another way for a tensor it has met has kept what it made of it, by identity or address; a graph's own inputs
    are such tensors."""
    args = bench.args("A")
    first, second = traced(forward, args)[0], traced(forward, args)[0]
    found = _apart(second, first, _DECIDED)
    return (
        None
        if found is None
        else Finding("stale-constant", found.where, f"kept for a tensor, whatever it holds by then: {found.detail}")
    )


def swallowed(found: Finding, refusals: list[CaptureRefused]) -> Finding:
    """A capture that went well although the model does what none allows went another way: the model caught the refusal."""
    for refusal in refusals:
        if found.cause == "unknown" or (refusal.where and refusal.where == found.where):
            return Finding(refusal.cause, refusal.where, f"refused while capturing, and the model went on without: {refusal.message}")
    return found


def _counted(mine: Script, theirs: Script) -> Finding | None:
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


def _weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers(), *held_tensors(module)]
    return [(path, t) for path, t in named if t.layout is torch.strided and not t.is_nested]


def diagnose(bench: Bench) -> Finding:
    """The cause of a wrong replay as far as an eager module shows it; ``unknown`` otherwise."""
    subject = bench.build()
    forward = subject.compose(subject.region)
    scripts: list[Script] = []
    outputs, held, holders = [], [], []
    strayed: list[CaptureRefused] = []
    weights = _weights(subject.module)  # kept alive likewise
    named = {t.untyped_storage()._cdata: path for path, t in reversed(weights)}
    for probe in ("A",) * (1 + _EQUAL_CALLS) + ("B",):  # the first call fills what is built lazily
        if scripts:
            script, out = traced(forward, bench.args(probe))
        else:
            script, out, strayed = on_a_stream(forward, bench.args(probe))
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
        if (found := _handed_out(after, before, "python-counter", "python-counter")) is not None:
            return replace(found, detail=found.detail + _moved(held[2], held[3]))
    if (found := _apart(last, other, _DECIDED) or _handed_out(other, last, "stale-constant", "python-branch")) is not None:
        return found
    before = equal[-1]
    for key, line in last.read.items():
        if key in before.made:
            holder = holders[_EQUAL_CALLS - 1].get(key, "")
            if key in before.outputs:
                return Finding("output-aliasing", line, f"a call reads what an earlier call returned{holder}")
            return Finding("stale-address", line, f"a call reads a tensor that an earlier call made and put in another's place{holder}")
    for before, after in pairwise([*equal, last]):
        if (found := _elsewhere(after, before, named, "python-counter")) is not None:
            return replace(found, detail=found.detail + _moved(held[2], held[3]))
    return _elsewhere(other, last, named, "python-branch") or _by_object(bench, forward) or Finding("unknown")


def diagnose_between(bench: Bench) -> Finding:
    """The cause of a replay that went wrong after ``between(module)``: a tensor of an earlier call that it dropped, at whose address a
    graph goes on reading, or what it changed in Python, which a graph holds fixed."""
    if bench.family.between is None:
        return Finding("unknown")
    subject = bench.build()
    forward = subject.compose(subject.region)
    first, _ = traced(forward, bench.args("A"))
    before, _ = traced(forward, bench.args("A"))
    held = plain(subject.module)
    bench.family.between(subject.module)
    for key, line in before.read.items():
        if key in first.made and first.made[key].expired():
            return Finding("stale-address", line, "a call reads a tensor that an earlier call made, and that is dropped between calls")
    moved = _moved(held, plain(subject.module))
    after, _ = traced(forward, bench.args("A"))
    found = _apart(after, before, _DECIDED)
    return Finding("unknown") if found is None else replace(found, detail=found.detail + moved)


def diagnose_noise(bench: Bench) -> Finding:
    """Why two eager sequences differ: a call that runs other operations on a second, equal build follows state that outlives a build
    (a global, a cache, a closure); else the kernels themselves are at fault."""
    scripts = []
    for _ in range(2):
        subject = bench.build()
        forward = subject.compose(subject.region)
        traced(forward, bench.args("A"))
        scripts.append(traced(forward, bench.args("A"))[0])
    found = _counted(*scripts)
    if found is None:
        return Finding("nondeterministic-kernel")
    return replace(found, detail=f"a second model, built alike, runs otherwise: {found.detail}")
