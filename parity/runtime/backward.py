"""Recording one training step's network: a forward graph, and a backward graph for one layout of incoming gradients.

The network runs on aliases of its parameters, leaves of their own on the same memory. So no older autograd graph (whose nodes live on
another stream) takes part, the optimizer's writes are no concern of what autograd saved, and autocast's weight cache starts empty: a
weight that is used twice is cast once, as in an eager step, and no cast that lies outside of the graph is read by it. The backward is
recorded outside of autocast, in this thread.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from parity.runtime import rng
from parity.runtime.buffers import Intake, Outlet
from parity.runtime.capture import hooked, hooked_backward, kept_by_hooks, outliving, uncached, undone, weakly
from parity.runtime.derived import Derived
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.fresh import GradientsRead, Outputs, Take, aliased, check, reached
from parity.runtime.gradients import Handout, Layout, blank
from parity.runtime.invalidation import LOCAL, generators
from parity.runtime.liveness import Guarded, Read, Trace, trace
from parity.runtime.memory import Memory, attributes_kept
from parity.runtime.pool import CAPTURES, Pool
from parity.runtime.state import unlike

_BORN_FROZEN: Final = 1000
"""Fewer frozen objects than this are the interpreter's own: Python 3.12 starts with 375. Whoever freezes, with torch loaded, freezes
100 000."""


@dataclass
class Recording:
    """``buffers``: those that a forward moves; ``before``: their values before the last one. ``serial``: how many forwards were
    replayed, so that a step can tell whether the graph's memory is still its own. ``last``: the step of that forward.
    ``gap``: why no certificate covers it, until its first use has shown eager's bits. ``given`` and ``bare``: positions of inputs, and
    parameters, that get no gradient, or none from a backward through some of the outputs."""

    forward: Any
    backward: Any
    intake: Intake
    incoming: Intake
    outputs: Outputs
    differentiable: list[int]
    outlet: Outlet
    handout: Handout
    layouts: tuple[Layout, ...]
    wrt: list[int]
    params: list[nn.Parameter]
    given: list[int]
    bare: list[nn.Parameter]
    buffers: list[Tensor]
    before: list[Tensor]
    generators: list[Any]
    derived: Derived | None
    pool: Pool
    device: int
    serial: int = 0
    gap: str = ""
    last: weakref.ref[Any] | None = None

    def hooked(self, leaves: list[Any]) -> bool:
        """Whether what some backward leaves without a gradient has a hook: eager does not call it, autograd would, with None. Of an
        input that was computed, what it was computed from may have one, or be given zeros."""
        given = [leaves[i] for i in self.given]
        return any(x.grad_fn is not None for x in given) or any(
            x._backward_hooks or x._post_accumulate_grad_hooks for x in (*given, *self.bare)
        )


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    LOCAL.busy = True
    try:
        yield
    finally:
        LOCAL.busy = False


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Within it collections look only at what is made within it: each of a whole heap, which may hold a million objects, takes about a
    second. And no graph or event that died in a cycle before is destroyed in the middle of a capture."""
    ours = gc.get_freeze_count() < _BORN_FROZEN  # somebody else's is not to be undone
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def _host(streams: rng.Streams) -> Any:
    numpy = streams.numpy
    return streams.python, streams.host.tolist(), None if numpy is None else (numpy[0], numpy[1].tolist(), *numpy[2:])


class _Recorder:
    def __init__(self, module: nn.Module, leaves: list[Any], spec: Any, layouts: tuple[Layout, ...], pool: Any) -> None:
        self.module, self.leaves, self.spec, self.layouts, self.pool = module, leaves, spec, layouts, pool
        seen: set[int] = set()
        self.wrt: list[int] = []
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.requires_grad and id(x) not in seen:
                seen.add(id(x))
                self.wrt.append(i)
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.owned = generators(module)
        with torch.no_grad():
            self.intake = Intake(leaves)

    def _take(self) -> Take:
        return Take(self.module, self.leaves, self.intake.leaves, self.spec)

    @contextlib.contextmanager
    def _unmoved(self) -> Iterator[None]:
        """Around a backward: puts parameters back that it writes to, and refuses that, as a write of the forward."""
        named = [(name, p) for name, p in self.module.named_parameters() if type(p) is nn.Parameter and p.layout is torch.strided]
        before = [p.detach().clone() for _, p in named]
        try:
            yield
        finally:
            moved = list(compress(zip(named, before, strict=True), unlike([p.data for _, p in named], before)))
            for (_, p), value in moved:
                p.data.copy_(value)
        if moved:
            raise CaptureRefused("buffer-drift", f"the network writes to parameter {moved[0][0][0]} in its backward")

    def probe(self) -> None:
        """Two plain runs: which buffers a forward moves, what a recording would freeze, and what of a run somebody keeps."""
        if hooked_backward(self.module):
            raise CaptureRefused("host-state", "a submodule has a backward hook, whose Python a replay would not run")
        host = _host(rng.save())
        with aliased(self.module, copies=True) as aliases:
            take = self._take()
            guard = Guarded(self.module.named_parameters())
            with guard:
                take.forward(aliases.params, self.wrt)
            if guard.found:  # each run before the capture would move it on, and a redone step would do so twice
                raise CaptureRefused("buffer-drift", f"the network writes to parameter {next(iter(guard.found))} in its forward")
            real, copies = [b for b, _ in aliases.buffers], [c for _, c in aliases.buffers]
            moved = zip(aliases.buffers, unlike(copies, real), strict=True)
            self.buffers = [b for (b, c), moves in moved if moves or (not c.is_inference() and c._version)]
            check(take, self.layouts)
            made, self.first = [take.outputs.tensors[i] for i in take.outputs.differentiable()], weakly(take.outputs.tensors)
            with torch.no_grad():
                self.incoming = Intake([blank(t, wanted) for t, wanted in zip(made, self.layouts, strict=True)])
            middle = [c.clone() for c in copies]
            with self._unmoved():
                take.backward(self.incoming.leaves)
            if {id(b) for b in self.module.buffers() if b.layout is torch.strided} != {id(c) for c in copies}:
                raise CaptureRefused("buffer-drift", "a step puts another tensor in the place of a buffer, where a replay would not")
            if any(unlike(copies, middle)):
                raise CaptureRefused("python-counter", "the backward writes to a buffer: it keeps count of something across steps")
        if any(not on_device(b) for b in self.buffers):
            raise CaptureRefused("host-state", "a step moves a buffer on the host, which a replay would not")
        settled = Memory(self.module)  # the first run may have filled caches for this shape
        passed = self._again()
        if place := settled.change(Memory(self.module)):
            raise CaptureRefused("python-counter", f"each step changes {place} of the module, which a replay would not")
        if _host(rng.save()) != host:
            raise CaptureRefused("host-state", "a step draws random numbers on the host, which a replay would repeat")
        self.left = outliving(passed, self.module) if hooked(self.module) else []

    def _again(self) -> list[StorageWeakRef]:
        with aliased(self.module, copies=True) as aliases:
            for p in aliases.params:  # as after an optimizer step: what is cached of weights shows, if its owner minds versions
                torch.autograd.graph.increment_version(p)
            with torch.no_grad():
                own = Intake(self.leaves).leaves
            take = Take(self.module, self.leaves, own, self.spec)
            with uncached():
                take.forward(aliases.params, self.wrt)
                take.backward(self.incoming.leaves)
            return weakly([*own, *take.outputs.tensors])

    def traced(self) -> Trace:
        """What a forward reads. What only a Python backward reads is not seen."""
        with aliased(self.module, copies=True) as aliases:
            take = self._take()

            def run(*_: Any) -> Any:
                outputs = take.forward(aliases.params, self.wrt)
                results = [t.detach() for t in outputs.tensors]
                outputs.tensors = []
                gc.collect()  # what only autograd kept is nobody's state
                return results

            with uncached(), GradientsRead():
                found = trace(run, take.inputs, self.module)
        found.result = None
        if found.written:
            raise CaptureRefused("input-mutation", f"the network writes to input {found.written[0]}, which a replay would not pass on")
        return found

    def capture(self, stream: Any, graph: Callable[..., Any]) -> tuple[Any, Any, Outputs, list[Tensor | None]]:
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for generator in self.owned:
            forward.register_generator_state(generator)
            backward.register_generator_state(generator)
        with aliased(self.module, copies=False) as aliases:
            take = self._take()
            with graph(forward, pool=self.pool.handle, stream=stream, capture_error_mode="thread_local"):
                take.forward(aliases.params, self.wrt)
            check(take, self.layouts)
            sure = reached([take.outputs.tensors[i] for i in take.outputs.differentiable()])
            # memory of its own: gradients that were lent lie there, and no other replay may write to them
            with graph(backward, pool=torch.cuda.graph_pool_handle(), stream=stream, capture_error_mode="thread_local"):
                grads = take.backward(self.incoming.leaves)
        self.unsure = [g is None or id(t) not in sure for t, g in zip(take.targets, grads, strict=True)]
        return forward, backward, take.outputs, grads


def reads(module: nn.Module, leaves: list[Any], spec: Any) -> list[Read]:
    """The tensors that a forward reads and the module does not own, as a recording would find them. Nothing else of it stays."""
    with CAPTURES, _ours(), _frozen(), attributes_kept(module):
        recorder = _Recorder(module, leaves, spec, (), None)
        streams = rng.save(recorder.owned)
        try:
            return recorder.traced().reads
        finally:
            rng.restore(streams)


def record_step(
    module: nn.Module, leaves: list[Any], spec: Any, layouts: tuple[Layout, ...], pool: Pool, *, cloning: bool
) -> Recording:
    """Captures forward and backward of ``module`` for the geometry of ``leaves`` and of the incoming gradients, one layout per
    differentiable output. Raises CaptureRefused before, and CaptureFailed after the capture began. Buffers, attributes and random
    streams are as before, whatever happens."""
    with CAPTURES, pool.lock, _ours():
        gc.collect()  # autograd graphs of earlier steps may hang in cycles, with nodes that live on another stream
        with _frozen():
            return _record(_Recorder(module, leaves, spec, layouts, pool), cloning)


def _record(recorder: _Recorder, cloning: bool) -> Recording:
    module, pool = recorder.module, recorder.pool
    streams = rng.save(recorder.owned)
    before, stream = torch.cuda.current_stream(), pool.capture_stream()
    stream.wait_stream(before)
    with attributes_kept(module):
        try:
            with torch.cuda.stream(stream):
                with rng.resets() as resets:
                    recorder.probe()
                rng.refuse(resets)
                traced = recorder.traced()
                kept_by_hooks(module, traced, recorder.left, recorder.first)
        finally:
            before.wait_stream(stream)
            rng.restore(streams)
        derived = Derived(traced.reads, module) if traced.reads else None
        with undone(before, stream, streams, traced):
            forward, backward, outputs, grads = recorder.capture(stream, torch.cuda.graph)
    if derived is not None:
        derived.settle()
    differentiable = outputs.differentiable()
    statics = [t.detach() for t in outputs.tensors]
    outputs.tensors = []  # the recorded autograd graph goes with them
    kept_grads = [None if g is None else g.detach() for g in grads]
    grads.clear()  # who else holds them is counted from here on
    foreign = [*recorder.intake.leaves, *recorder.incoming.leaves, *statics, *module.parameters(), *module.buffers()]
    return Recording(
        forward,
        backward,
        recorder.intake,
        recorder.incoming,
        outputs,
        differentiable,
        Outlet(statics, [], clone=True),
        Handout(
            kept_grads,
            [*(None for _ in recorder.wrt), *recorder.params],
            [t for t in foreign if isinstance(t, Tensor) and t.layout is torch.strided],
            cloning,
        ),
        recorder.layouts,
        recorder.wrt,
        recorder.params,
        list(compress(recorder.wrt, recorder.unsure)),
        list(compress(recorder.params, recorder.unsure[len(recorder.wrt) :])),
        [b.data for b in recorder.buffers],
        [torch.empty_like(b) for b in recorder.buffers],
        recorder.owned,
        derived,
        pool,
        torch.cuda.current_device(),
    )
