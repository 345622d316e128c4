"""Recording one graph: warm-up on the capture stream, a traced eager call, the capture itself, all side effects undone."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from parity.runtime import nodes, rng, tree
from parity.runtime.buffers import Intake, Outlet
from parity.runtime.capture import hooked, kept_by_hooks, outliving, uncached, undone, unfit, weakly
from parity.runtime.cudart import Cudart, Unfit
from parity.runtime.derived import Derived
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.invalidation import LOCAL, generators
from parity.runtime.liveness import Trace, trace
from parity.runtime.pool import CAPTURES, Pool
from parity.runtime.state import kept

_LOG = logging.getLogger("parity.runtime")


@dataclass
class Entry:
    """One captured graph. ``derived``: what it reads that may go stale, None where nothing. ``weights``, ``clock``: versions and clock
    at capture. ``doubt``: its derived tensors have to be compared again before the next replay. ``early``: captured ahead of use.
    ``copies``: those that are nodes of the graph; launched by itself, such a graph writes over the last results."""

    graph: Any
    intake: Intake
    outlet: Outlet
    pool: Pool
    traced: Trace
    derived: Derived | None
    weights: int | None = None
    clock: int = 0
    doubt: bool = False
    early: bool = False
    replays: int = 0
    copies: nodes.Copies | None = None

    @property
    def inputs(self) -> list[Any]:
        return self.intake.leaves

    @property
    def outputs(self) -> list[Any]:
        return self.outlet.leaves

    def doubtful(self) -> bool:
        return self.derived is not None and (self.doubt or self.derived.superseded())

    def replay(self, leaves: Any) -> Any:
        """``leaves``: of the call, in order. Their geometry is that of the capture: the caller looked it up. Raises StreamCaptured.

        The current device does not matter: copies run where their tensors lie, a replay where the graph was captured, and each on the
        stream that is current there."""
        stream = self.pool.begin()
        try:
            fresh: Sequence[Tensor] = ()
            if (copies := self.copies) is not None:
                try:
                    fresh = copies.tell(leaves)
                except Unfit as reason:
                    self._withdraw(copies, reason)
                    copies = None
            if copies is None or not copies.takes:
                self.intake.fill(leaves)
            if copies is None or not copies.numbered:
                self.graph.replay()
            else:
                copies.launch(stream)
            self.replays += 1
            return self.outlet.hand_out(leaves, fresh)
        finally:
            self.pool.end()

    def _withdraw(self, copies: nodes.Copies, reason: Unfit) -> None:
        """Copies go beside the graph for good, once CUDA does not take the memory of a call."""
        _LOG.info("cuda_graph: copies go beside their graph: %s", str(reason))
        self.pool.settle()
        copies.withdraw()
        self.copies = None


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """Runners within the region step aside; autocast casts weights inside the graph, for copies in its cache die with its block."""
    LOCAL.busy = True
    try:
        with uncached():
            yield
    finally:
        LOCAL.busy = False


def cannot(leaves: list[Any], module: nn.Module | None) -> str:
    """Why a call of ``module`` (or of a region without one) can be neither captured nor replayed as things are; empty where it can."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if module is not None and any(map(is_lazy, itertools.chain(module.parameters(), module.buffers()))):
        return "a parameter has no shape before the first call"
    if not any(map(on_device, tensors)):
        return "no input is on a CUDA device"
    if torch.cuda.is_current_stream_capturing():
        return "the current stream is being captured by somebody else"
    if torch.is_grad_enabled() and any(t.requires_grad for t in [*tensors, *(module.parameters() if module is not None else ())]):
        return "gradients are enabled: this runner captures inference only"
    return unfit(leaves)


def retrace(region: Callable[..., Any], module: nn.Module | None, leaves: list[Any], spec: Any) -> Trace:
    """What a call reads, side effects undone, no result kept."""
    static = _intake(leaves).leaves
    args, kwargs = tree.unflatten(static, spec)
    streams = rng.save(generators(module), generators(module, "cpu"))
    try:
        with _ours(), kept(module):
            traced = trace(lambda *_: region(*args, **kwargs), static, module)
    finally:
        rng.restore(streams)
    traced.result = None
    return traced


def record(
    region: Callable[..., Any],
    module: nn.Module | None,
    leaves: list[Any],
    spec: Any,
    pool: Pool,
    *,
    warmup: int,
    clone: bool,
) -> Entry:
    """Captures ``region`` for the geometry of ``leaves``. Raises CaptureRefused before, and CaptureFailed after the capture began; what
    the region itself raises in an eager call passes through."""
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not on_device(leaf):
            raise CaptureRefused("host-state", f"input {position} is a host tensor: what Python reads from it would freeze")
    with CAPTURES, pool.lock, _ours():
        return _record(region, module, leaves, spec, pool, warmup, clone)


def _record(
    region: Callable[..., Any], module: nn.Module | None, leaves: list[Any], spec: Any, pool: Pool, warmup: int, clone: bool
) -> Entry:
    intake = _intake(leaves)
    given: Any = None

    def call(*_: Any) -> Any:
        nonlocal given
        given = args, kwargs = tree.unflatten(intake.leaves, spec)  # each call may change the containers that it is given
        return region(*args, **kwargs)

    def passed() -> list[StorageWeakRef]:
        own = _intake(leaves).leaves
        args, kwargs = tree.unflatten(own, spec)
        return weakly([*own, *tree.flatten(region(*args, **kwargs))[0]])

    owned = generators(module)
    streams = rng.save(owned, generators(module, "cpu"))
    before = torch.cuda.current_stream()
    stream = pool.capture_stream()
    stream.wait_stream(before)
    try:
        with kept(module), torch.cuda.stream(stream), rng.resets() as resets:
            first = 0
            for again in range(warmup - 1):
                call()
                first = first if again else len(resets)
            left = outliving(passed(), module) if hooked(module) else []
            traced = trace(call, intake.leaves, module)
            drawn = traced.random or rng.drawn(streams)
    finally:
        before.wait_stream(stream)
        rng.restore(streams)
    if not tree.alike(given, intake.leaves, spec):
        raise CaptureRefused("input-mutation", "the region changes a container among its arguments, which a replay would not")
    rng.refuse(resets, first)
    kept_by_hooks(module, traced, left, weakly(tree.flatten(traced.result)[0]))
    _check(traced)
    derived = Derived(traced.reads, module) if traced.reads else None
    runtime = nodes.available()
    known = _elsewhere(traced.result, intake) if runtime is not None else set()
    eager, traced.result = traced.result, None  # eager's lives on meanwhile: the capture's shall not get its addresses
    graph = torch.cuda.CUDAGraph(keep_graph=True) if runtime is not None else torch.cuda.CUDAGraph()
    for generator in owned:
        graph.register_generator_state(generator)
    with undone(before, stream, streams, traced):
        with (
            kept(module, executed=False),
            torch.cuda.graph(graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"),
        ):
            result = call()
        del eager
        outlet = Outlet(result, intake.leaves, clone)
        copies = _copies(runtime, graph, intake.pieces(), outlet.pieces(known), leaves, not drawn) if runtime is not None else None
    if any(isinstance(x, Tensor) and not on_device(x) for x in tree.flatten(result)[0]):
        raise CaptureRefused("host-state", "an output is a host tensor: every replay would hand out the one made at capture")
    if derived is not None:
        derived.settle()
    return Entry(graph, intake, outlet, pool, traced, derived, copies=copies)


def _intake(leaves: list[Any]) -> Intake:
    """Static inputs, those of which require gradients that do in the call: a region may ask for gradients of its own."""
    intake = Intake(leaves)
    for static, leaf in zip(intake.leaves, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            static.requires_grad_()
    return intake


def _elsewhere(result: Any, intake: Intake) -> set[int]:
    """Where the tensors of an eager result lie, except on static inputs. What lies there also in a capture is not the graph's own."""
    own = {x.untyped_storage().data_ptr() for x in intake.leaves if isinstance(x, Tensor)}
    results = [x for x in tree.flatten(result)[0] if isinstance(x, Tensor) and x.layout is torch.strided]
    return {x.data_ptr() for x in results if x.numel() and x.untyped_storage().data_ptr() not in own}


def _copies(
    runtime: Cudart, graph: Any, incoming: list[tuple[int, Tensor]], outgoing: list[Tensor], leaves: list[Any], several: bool
) -> nodes.Copies | None:
    """Instantiates a kept graph, with copies as nodes of it where CUDA takes them. Raises CudaError."""
    if all(x.is_cuda for x in outgoing) and (incoming or outgoing):
        try:
            return nodes.Copies(runtime, graph, incoming, outgoing, leaves, several)
        except Unfit as reason:
            _LOG.info("cuda_graph: copies stay beside their graph: %s", str(reason))
            return None
    graph.instantiate()
    return None


def _check(traced: Trace) -> None:
    leaves, _ = tree.flatten(traced.result)
    if traced.written:
        raise CaptureRefused("input-mutation", f"the region writes to input {traced.written[0]}, which a replay would not pass on")
    if foreign := tree.opaque(leaves):
        raise CaptureRefused("host-state", f"an output is a {foreign[0].__qualname__}, whose tensors cannot be seen")
    if not any(isinstance(x, Tensor) for x in leaves):
        raise CaptureRefused("unknown", "the output holds no tensor")
    for x in leaves:
        if isinstance(x, Tensor) and type(x) not in (Tensor, nn.Parameter):
            raise CaptureRefused("unknown", f"an output is a {type(x).__name__}: what it holds besides its values is not copied")
        if isinstance(x, Tensor) and x.grad_fn is not None:
            raise CaptureRefused("unknown", "an output carries a graph for a backward, which one replay would share with the next")
