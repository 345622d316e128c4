"""What a difference that no condition explains says by itself, and what the network's forward says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from parity.judge.bits import Difference, difference
from parity.judge.diagnose import Finding, diagnose
from parity.judge.outcome import Check
from parity.judge.train.comparison import Found, Run
from parity.judge.train.step import TrainBench, mixed
from parity.rows.family import Subject
from parity.runtime import tree

if TYPE_CHECKING:
    from parity.judge.subject import Bench


def lasting(found: Found) -> bool:
    """Whether a difference in the run that captured is none of the random numbers drawn meanwhile: counts of steps, other shapes."""
    _, part, tensor = found
    return not tensor.formed_alike or (part == "buffers" and tensor.counts)


def cause_of(found: Sequence[Found], eager: Run, arm: Run, changes: str, stale: Sequence[str]) -> tuple[str, str]:
    """(cause, what says so), ``unknown`` where nothing does. ``eager``, ``arm``: a run of each; ``changes``: an attribute that each
    eager step changes; ``stale``: what a replay read after it had died."""
    if stale:
        return "stale-address", f"read after it had died: {stale[0]}"
    if changes:
        return "python-counter", f"each eager step changes {changes} of the module"
    parts = {part for _, part, _ in found}
    if parts == {"gradients"}:
        return _gradients(found, eager, arm)
    if parts == {"buffers"}:
        return "buffer-drift", "nothing but buffers differs"
    if "rng" in parts:
        return "rng", "a step leaves the generators where eager's does not"
    if parts == {"loss"}:
        return "host-state", "the outputs are eager's, so the loss reads something else that a replay does not renew"
    if parts == {"outputs"} and all(_repeats(tensor.path, step, arm) for step, _, tensor in found):
        return "stale-constant", "a replay returns what another one did"
    return "unknown", ""


def _repeats(path: str, step: int, arm: Run) -> bool:
    values = [dict(left.outputs.leaves()).get(path) for left in arm]
    return any(difference(path, values[step], other) is None for other in (*values[:step], *values[step + 1 :]))


def _gradients(found: Sequence[Found], eager: Run, arm: Run) -> tuple[str, str]:
    values = [(path, *_pair(path, step, eager, arm), step) for step, path in ((s, t.path) for s, _, t in found)]
    if all(theirs is None for _, _, theirs, _ in values):
        return "dead-input", "eager gives no gradient where this arm gives one"
    if all(mine is None for _, mine, _, _ in values):
        return "host-state", "this arm hands out no gradient where eager gives one"
    if all(_taken_from(mine, step, path, eager) for path, mine, _, step in values):
        return "output-aliasing", "a parameter is given the gradient of another one"
    return "unknown", ""


def _pair(path: str, step: int, eager: Run, arm: Run) -> tuple[Any, Any]:
    return dict(arm[step].gradients.leaves()).get(path), dict(eager[step].gradients.leaves()).get(path)


def _taken_from(value: Any, step: int, path: str, eager: Run) -> bool:
    others = (g for name, g in eager[step].gradients.leaves() if name != path)
    return isinstance(value, Tensor) and any(difference(path, value, g) is None for g in others)


class _Region:
    """The network of a training row, as ``diagnose`` wants a region and its arguments: those that the loss gives it."""

    def __init__(self, bench: TrainBench) -> None:
        self._bench = bench
        self._subject = bench.build()
        self._given = {probe: self._seen(probe) for probe in "AB"}  # both before any call that is traced: each runs the network, too

    def build(self) -> Subject:
        return Subject(self._subject.module, self._region)

    def _region(self, *args: Any) -> Any:
        positional, named = args
        leaves, spec = tree.flatten(self._subject.network(*positional, **named))
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call, unused-ignore]
            kept = [x.detach() if isinstance(x, Tensor) else x for x in leaves]  # whoever keeps results keeps no autograd graph
        return tree.unflatten(kept, spec)

    def args(self, probe: str) -> tuple[Any, ...]:
        made: tuple[Any, ...] = tree.leafed(self._given[probe])
        return made

    def _seen(self, probe: str) -> tuple[Any, ...]:
        given: list[Any] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            given.extend(tree.cloned((args, kwargs)))
            return self._subject.network(*args, **kwargs)

        self._subject.loss(forward, *self._bench.args(probe))
        return tuple(given)

    def writes(self) -> str:
        """The first parameter that a forward writes to in place; empty where there is none."""
        positional, named = self.args("A")
        before = {name: p._version for name, p in self._subject.module.named_parameters()}
        self._subject.network(*positional, **named)
        return next((name for name, p in self._subject.module.named_parameters() if before.get(name, p._version) != p._version), "")


def traced_cause(bench: TrainBench) -> Finding:
    """What the network's forward itself shows: ``diagnose``, on the network in training mode. With gradients, which a loss or a
    forward may ask for."""
    with bench.around(), mixed(bench.dtype, cache=True):
        region = _Region(bench)
        found = diagnose(cast("Bench", region))
        if found.cause == "unknown" and (name := region.writes()):
            return Finding("buffer-drift", "", f"a forward writes to parameter {name} in place, so that a warm-up moves it, too")
        return found


def failure(name: str, differences: list[Difference], cause: str, reason: str, where: str = "") -> Check:
    """A check that failed, by what differs."""
    figures = {"differences": len(differences), "first": [str(d) for d in differences[:5]]}
    return Check(name, "failed", f"{differences[0]}; {reason}" if reason else str(differences[0]), cause, where, figures)
