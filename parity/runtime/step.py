"""One step: listened to while it is eager, or replayed, or, where the replayed backward would not be eager's, redone from its state."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parity.runtime import rng, tree
from parity.runtime.backward import Recording
from parity.runtime.errors import ParityError, StaleGraph
from parity.runtime.fresh import Outputs, Take, aliased, flagged, nodes_of
from parity.runtime.gradients import ODD, Layout, layout
from parity.runtime.invalidation import LOCAL
from parity.runtime.signature import Signature
from parity.runtime.state import same_bits

if TYPE_CHECKING:
    from parity.runtime.training import TrainGraphs


class DoubleBackward(ParityError, RuntimeError):
    """A replayed forward was to be differentiated twice, which would add its gradients up in another order than eager."""


@dataclass(frozen=True)
class Known:
    """Of the forwards of a signature. ``inner``: those outputs from which other outputs were computed: a hook on one hears more than
    what comes from outside. ``several``: whether a leaf gets its gradient in parts that its backward adds up."""

    inner: frozenset[int]
    several: bool

    @classmethod
    def of(cls, outputs: Outputs) -> Known:
        edges = Counter(edge for node in nodes_of(outputs.tensors) for edge in node.next_functions)
        inner = (i for i in outputs.differentiable() if (outputs.tensors[i].grad_fn, outputs.tensors[i].output_nr) in edges)
        cast = torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled()
        return cls(frozenset(inner), cast or any(n > 1 and hasattr(node, "variable") for (node, _), n in edges.items()))


class EagerStep:
    """An eager step that is listened to: how the gradients of its outputs arrive."""

    def __init__(self, key: Signature, result: Any, leaves: list[Any], known: Known | None) -> None:
        outputs = Outputs.of(result, leaves)
        self.known = Known.of(outputs) if known is None else known
        inner = self.known.inner
        self.result = result
        self.counts = known is not None or not inner
        """Whether it tells what comes from outside: the first step of a signature shows who listens to inner outputs."""
        if inner and self.counts:  # the caller gets views, through which only the gradients from outside come
            outputs.tensors = [t.view_as(t) if i in inner else t for i, t in enumerate(outputs.tensors)]
            self.result = outputs.build(outputs.tensors, leaves)
        places = outputs.differentiable()
        self.key = key
        self.heard = self.overheard = False
        self.task = -1
        self.layouts: list[Layout] = [None] * len(places)
        self._listeners: dict[int, tuple[Any, Any]] = {}
        for position, place in enumerate(places):
            tensor: Any = outputs.tensors[place]
            tensor.register_hook(functools.partial(self._hear, position))
            if place in inner and not self.counts:
                self._listeners[position] = tensor._backward_hooks, weakref.ref(tensor)

    def _hear(self, position: int, grad: Tensor) -> None:
        self.heard, self.task = True, torch._C._current_graph_task_id()
        if position in self._listeners:
            hooks, reference = self._listeners[position]
            tensor = reference()
            self.overheard |= len(hooks) > 1 or (tensor is not None and tensor.retains_grad)
        plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"))  # as the backward is captured
        if self.layouts[position] != ODD:
            self.layouts[position] = layout(grad) if plain else ODD


def unplayable(steps: Sequence[EagerStep], replayed: Sequence[tuple[int, Signature, bool]]) -> dict[Signature, str]:
    """The signatures whose steps a replay would not give eager's bits, as their backwards told, and why.

    To a weight that a forward uses in several places eager gives the gradients one by one, also where one backward goes through
    several forwards; a replay gives them in one sum. And autocast, where it keeps its casts, casts a weight once for all forwards, a
    replay once for itself. ``replayed``: (number of the backward, signature, whether that matters) of the last replay."""
    found = {s.key: "a hook, or retain_grad(), hears all gradients of an output from which others come" for s in steps if s.overheard}
    every = [*((s.task, s.key, s.known.several) for s in steps), *replayed]
    tasks = Counter(task for task, _, _ in every)
    joint = (key for task, key, several in every if several and tasks[task] > 1)
    return {**dict.fromkeys(joint, "one backward goes through several of its forwards"), **found}


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else same_bits(a, b)


def _versions(leaves: list[Any]) -> list[int]:
    return [x._version if isinstance(x, Tensor) and not x.is_inference() else 0 for x in leaves]


class Step:
    """One replayed forward, and whatever backward comes of it."""

    def __init__(self, owner: TrainGraphs, recording: Recording, key: Signature, args: Any, kwargs: Any, leaves: list[Any]) -> None:
        self.owner, self.recording, self.key = owner, recording, key
        self.args, self.kwargs, self.leaves = args, kwargs, leaves
        self.versions = _versions(leaves)
        self.epoch = owner._epoch
        self.training = owner._watch.training
        self.autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
        self.done = False
        self.serial = -1
        self.states: list[tuple[Any, Tensor]] = []

    def _generators(self) -> list[Any]:
        return [torch.cuda.default_generators[self.recording.device], *self.recording.generators]

    def forward(self) -> list[Tensor]:
        r = self.recording
        r.pool.begin()
        try:
            self.states = [(g, g.get_state()) for g in self._generators()]
            if r.buffers:
                torch._foreach_copy_(r.before, r.buffers)
            r.serial += 1
            self.serial = r.serial
            if r.last is not None and (before := r.last()) is not None:
                before.forget()
            r.last = weakref.ref(self)
            r.intake.fill(self.leaves)
            r.forward.replay()
            made: list[Tensor] = r.outlet.hand_out([])
            return made
        finally:
            r.pool.end()

    def forget(self) -> None:
        """It cannot be redone any more, and whoever keeps its loss shall not keep its batch."""
        self.args, self.kwargs, self.leaves = (), {}, []

    def undo(self) -> None:
        """As before the forward."""
        if self.serial >= 0:
            if self.recording.buffers:
                torch._foreach_copy_(self.recording.buffers, self.recording.before)
            for generator, state in self.states:
                generator.set_state(state)

    def backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of the inputs that require them, then of the parameters."""
        r = self.recording
        incoming = [grads[i] for i in r.differentiable]
        layouts = tuple(map(layout, incoming))
        first, self.done = not self.done, True
        if torch.is_grad_enabled():
            raise DoubleBackward(
                f"{self.owner.name}: create_graph=True through a replayed forward would not give eager's bits: use it from the first "
                "step on, which is then never captured, or call the network itself for such a step"
            )
        if first:
            known = self.owner._known.get(self.key)
            self.owner._replayed[:] = [(torch._C._current_graph_task_id(), self.key, known is not None and known.several)]
            self.owner._heard(self.key, layouts)
        if not first or layouts != r.layouts or torch.is_autocast_enabled("cuda"):
            return self.again(incoming)
        if not r.handout.settle():
            self.owner._cloning = True  # its successor hands out copies
            self.owner._drop(r)
            return self.again(incoming)
        try:
            r.pool.begin()
            try:
                r.incoming.fill(incoming)
                r.backward.replay()
                taken = r.handout.take()
            finally:
                r.pool.end()
        except Exception as error:
            self.owner._fail(f"the backward of a replay failed: {type(error).__name__}: {error}", error)
            return self.again(incoming)
        return self._proved(incoming, taken) if r.gap else taken

    def unlike_eager(self, made: Sequence[Tensor]) -> str:
        """How the replayed forward differs from an eager one from the same state, in words. Leaves behind what the eager one does."""
        r = self.recording
        buffers, streams = [b.clone() for b in r.buffers], [g.get_state() for g, _ in self.states]
        self.undo()
        busy, LOCAL.busy = LOCAL.busy, True
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # casts of weights made here are nobody else's
        try:
            expected = Outputs.of(self.owner.network(*self.args, **self.kwargs), self.leaves).tensors
        finally:
            torch.set_autocast_cache_enabled(cached)
            LOCAL.busy = busy
        if len(made) != len(expected) or not all(map(same_bits, made, expected)):
            return "an output differs from eager"
        if not all(map(same_bits, buffers, r.buffers)):
            return "a buffer differs from eager"
        if not all(torch.equal(state, g.get_state()) for state, (g, _) in zip(streams, self.states, strict=True)):
            return "the random stream differs from eager"
        return ""

    def _proved(self, incoming: list[Tensor | None], taken: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a first use that no certificate covers, where they are eager's; else eager's, and no replay from then on.
        Those for which two eager runs give different bits are not judged."""
        eager = self.again(incoming)
        odd = [i for i, (mine, theirs) in enumerate(zip(taken, eager, strict=True)) if not _alike(mine, theirs)]
        if odd:
            second = self.again(incoming)
            odd = [i for i in odd if _alike(second[i], eager[i])]
        if odd:
            self.owner._stop(f"{self.recording.gap}, and its first use did not validate: {len(odd)} gradients differ from eager")
            return eager
        self.recording.gap = ""
        return taken

    def again(self, incoming: list[Tensor | None]) -> list[Tensor | None]:
        """The step eagerly, from the state before it, with the flags of then, and on leaves of its own: a hook of a weight or of an
        input is called when what this returns gets there."""
        r = self.recording
        if what := self.owner._watch.look():
            self.owner.release(what)
            raise StaleGraph(f"{self.owner.name}: a backward has to run eagerly, and since its forward {what}")
        if self.epoch != self.owner._epoch:
            raise StaleGraph(f"{self.owner.name}: a backward has to run eagerly, and its forward was before invalidate() or a release")
        if self.serial != r.serial or _versions(self.leaves) != self.versions:
            raise StaleGraph(
                f"{self.owner.name}: a backward has to run eagerly (the second one through a forward, or one in another layout), but a "
                "later forward has overwritten the state it started from, or an input was modified"
            )
        buffers = [b.clone() for b in r.buffers]
        streams = rng.save(r.generators)
        enabled, dtype, cache = self.autocast
        busy, LOCAL.busy = LOCAL.busy, True
        try:
            self.undo()
            take = Take(self.owner.network, self.leaves, self.leaves, tree.flatten((self.args, self.kwargs))[1])
            with aliased(self.owner.network, copies=False, trained=r.params) as aliases:
                with (
                    flagged(self.owner._watch.modules(), self.training),
                    torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=cache),
                ):
                    outputs = take.forward(aliases.params, r.wrt)
                made = [outputs.tensors[i] for i in outputs.differentiable()]
                roots = [(t, g) for t, g in zip(made, incoming, strict=True) if g is not None]
                if not roots:
                    return [None] * len(take.targets)
                outs, grads = [t for t, _ in roots], [g for _, g in roots]
                return list(torch.autograd.grad(outs, take.targets, grads, allow_unused=True))
        finally:
            LOCAL.busy = busy
            with torch.no_grad():
                if buffers:
                    torch._foreach_copy_(r.buffers, buffers)
            rng.restore(streams)


class Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, *wrt: Tensor) -> Any:
        outs = step.forward()
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*step.recording.params)  # torch tells who steps the optimizer before the backward, or frees the graph
        differentiable = set(step.recording.differentiable)
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outs) if i not in differentiable))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        return (None, *ctx.step.backward(grads))


def replayed(step: Step) -> Sequence[Tensor]:
    """Its outputs. Where there are several, each has a node of its own, so that a hook on one is called when its gradient comes, and
    not whenever one of the others does."""
    r = step.recording
    made: Sequence[Tensor] = Replayed.apply(step, *(step.leaves[i] for i in r.wrt), *r.params)
    if len(r.differentiable) < 2:
        return made
    own = set(r.differentiable)
    return [torch.ops.aten.alias.default(t) if i in own else t for i, t in enumerate(made)]
