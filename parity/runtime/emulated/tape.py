"""The recorded operations of one capture, with the storages that they read and write, and their replay.

What the capture allocated is owned, and kept alive as far as a replay or anybody else can tell. Everything else is known by address
and held weakly, as a CUDA graph holds it: once freed, or moved, a replay reads poison there and says so. A capture computes (later ones
need sensible shapes and indices) but must seem to have computed nothing: what it wrote outside is undone at its end, and what it owns
is poisoned when somebody first looks: at the first replay, or at the first operation outside a capture that reads it. Memory that
anybody can see is never reused within a tape or between tapes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload

from parity.runtime.errors import StaleGraph

from .addresses import POISON, DeadRead, External, Ref, filled, layout_of, refs_in
from .generators import Counter, drawing
from .memory import Block, block_of
from .plans import Plan
from .repeats import OPEN, REPEATS, still
from .state import STATE, quiet
from .transient import SMALL, Owned, Transient, Use, put

_numbers = itertools.count(1)
aten = torch.ops.aten


@dataclass
class _Op:
    func: OpOverload[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    counter: Counter | None
    grad: bool  # some kernels keep a workspace for backward if gradients are enabled
    heavy: bool
    writes: list[int]  # storages, by identity
    results: list[tuple[int, Ref]] = field(default_factory=list)
    single: bool = False  # it returns one tensor, not a list


class _Step(NamedTuple):
    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor | Transient | None  # where the only result goes
    results: tuple[tuple[int, Tensor | Transient], ...]  # or where several go
    counter: Counter | None
    grad: bool
    heavy: OpOverload[..., Any] | None  # whose results are worth remembering
    last: tuple[Transient, ...]  # what is not used again


def _uses(ops: Iterable[_Op]) -> dict[int, Use]:
    """Per storage what operations do to it, in their order."""
    found: dict[int, Use] = {}
    for place, op in enumerate(ops):
        for ref in [*refs_in(op.args), *refs_in(op.kwargs.values())]:
            found.setdefault(ref.key, Use()).add(ref, place)
        for _, ref in op.results:
            found.setdefault(ref.key, Use()).add(ref, place, result=True)
        for key in op.writes:
            found[key].written = True
    return found


def flat_tensors(out: Any) -> list[Any]:
    """Results in order; what is no tensor keeps its place."""
    if isinstance(out, (list, tuple)):
        return [leaf for item in out for leaf in flat_tensors(item)]
    return [out]


def look(blocks: Iterable[Block | None]) -> None:
    """Outside a capture somebody reads: what captures computed turns into what they leave behind."""
    if not STATE.unsealed or STATE.graph is not None:
        return
    for block in blocks:
        weak = None if block is None else STATE.unsealed.get(block.graph)
        if weak is not None and (tape := weak()) is not None:
            tape.seal()


class Tape:
    def __init__(self) -> None:
        self.number = next(_numbers)
        self.owned: dict[int, Owned] = {}
        self.stale: list[DeadRead] = []
        self.sealed = False
        self._ops: list[_Op] = []
        self._refs: dict[tuple[Any, ...], Ref] = {}
        self._undo: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self._externals: list[External] = []
        self._steps: list[_Step] = []
        self._kept: list[UntypedStorage] = []
        self._repeatable = False
        self._counters: list[Counter] = []
        self._reads: list[UntypedStorage] = []  # whose values from before a replay count
        self._writes: list[UntypedStorage] = []

    def __len__(self) -> int:
        return len(self._steps) or len(self._ops)

    # ------------------------------------------------------------ recording
    def begin(
        self, func: OpOverload[..., Any], plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], counter: Counter | None
    ) -> _Op | None:
        """Before the operation runs. None: it launches no kernel."""
        if not plan.recorded:
            return None
        writes = [tensor.untyped_storage() for tensor in plan.written(args, kwargs)]
        for storage in writes:
            if storage._cdata not in self.owned and storage._cdata not in self._undo:
                self._undo[storage._cdata] = (storage, storage.clone())
        note = self._noted
        return _Op(
            func, [note(a, plan) for a in args], {k: note(v, plan) for k, v in kwargs.items()}, counter, torch.is_grad_enabled(),
            plan.heavy, [storage._cdata for storage in writes],
        )  # fmt: skip

    def _noted(self, value: Any, plan: Plan) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._noted(v, plan) for v in value]
        if not isinstance(value, Tensor):
            return value
        if block_of(value) is None and not plan.transfer:
            return value.detach().clone()  # the host's values are read while capturing: frozen
        return self._ref(value)

    def _ref(self, tensor: Tensor) -> Ref:
        cdata = tensor.untyped_storage()._cdata
        layout = layout_of(tensor)
        ref = self._refs.get((cdata, layout))
        if ref is None:  # an alias made below autograd: later changes of the tensor's own metadata do not reach it
            ref = self._refs[cdata, layout] = Ref(layout, cdata, None if cdata in self.owned else aten.alias.default(tensor))
        return ref

    def own(self, storage: UntypedStorage) -> None:
        self.owned[storage._cdata] = Owned(storage)

    def end(self, op: _Op, plan: Plan, out: Any, results: Iterable[tuple[int, Tensor]]) -> None:
        """After it ran. ``results``: what it returned in new storages, by place in ``out``."""
        op.single = isinstance(out, Tensor)
        op.results = [(i, self._ref(t)) for i, t in results]
        if op.results or plan.writes:
            self._ops.append(op)

    def undo(self) -> None:
        """What the capture wrote to storages of others is put back: a capture executes nothing."""
        with quiet():
            for storage, before in self._undo.values():
                storage.copy_(before)
        self._undo.clear()

    def finish(self) -> None:
        """Recording is over: externals become weak, calls are built once and for all."""
        uses = _uses(self._ops)
        with quiet():
            transients = {key: found for key, use in uses.items() if (found := self._placed(key, use)) is not None}
            kept = {storage._cdata for storage in self._kept}
            self._kept += [s for s in self._alive() if s._cdata not in kept]
        last: dict[int, list[Transient]] = {}
        for key, transient in transients.items():
            last.setdefault(uses[key].last, []).append(transient)
        for place, op in enumerate(self._ops):
            results = tuple((i, transients.get(ref.key) or filled(ref)) for i, ref in op.results)
            args, kwargs = tuple(filled(a) for a in op.args), {k: filled(v) for k, v in op.kwargs.items()}
            call = getattr(op.func, "_op", op.func)
            single, several = (results[0][1], ()) if op.single and results else (None, results)
            heavy = op.func if op.heavy and not op.grad and still(op.func, args) else None
            self._steps.append(_Step(call, args, kwargs, single, several, op.counter, op.grad, heavy, tuple(last.get(place, ()))))
        self._repeatable = not any(op.grad or getattr(op.func, "namespace", "") not in OPEN for op in self._ops)
        self._counters = [op.counter for op in self._ops if op.counter is not None]
        self._ops, self._refs = [], {}
        number = self.number
        STATE.unsealed[number] = weakref.ref(self, lambda _: STATE.unsealed.pop(number, None))

    def _placed(self, key: int, use: Use) -> Transient | None:
        """Gives the refs of one storage their tensors. Returns it if it is transient."""
        if key not in self.owned:
            origin = next(ref.tensor for ref in use.refs.values() if ref.tensor is not None)
            external = External(origin.untyped_storage())
            self._externals.append(external)
            for ref in use.refs.values():
                external.adopt(ref)
            self._noted_use(use, external.raw)
            return None
        nbytes, storage = self.owned[key].nbytes, self.owned[key].alive()
        if storage is None and use.fills(nbytes) and nbytes >= SMALL and use.reach <= nbytes and use.born is not None:
            transient = Transient(nbytes, use.born.layout)
            for ref in use.refs.values():
                ref.tensor = transient.adopt(ref.layout)
            return transient
        if storage is None:
            storage = UntypedStorage(max(nbytes, use.reach))
        self._kept.append(storage)
        for ref in use.refs.values():
            ref.tensor = ref.layout.at(storage)[-1]
        self._noted_use(use, storage)
        return None

    def _noted_use(self, use: Use, storage: UntypedStorage) -> None:
        if storage.nbytes() and not use.fills(storage.nbytes()):
            self._reads.append(storage)
        if storage.nbytes() and use.written:
            self._writes.append(storage)

    def _alive(self) -> list[UntypedStorage]:
        return [storage for owned in self.owned.values() if (storage := owned.alive()) is not None]

    # ------------------------------------------------------------ sealing
    def poison(self, byte: int = POISON) -> None:
        with quiet():
            for storage in self._kept or self._alive():
                storage.fill_(byte)  # type: ignore[attr-defined]

    def seal(self) -> None:
        """Leaves garbage in what the capture computed, once."""
        STATE.unsealed.pop(self.number, None)
        if not self.sealed:
            self.sealed = True
            self.poison()

    def drop(self) -> None:
        """The capture failed: nothing of it remains."""
        self.undo()
        self.seal()
        self._ops, self._refs, self.owned = [], {}, {}

    # ------------------------------------------------------------ replay
    def dead(self) -> list[DeadRead]:
        with quiet():
            return [e.dead_read for e in self._externals if e.hold() is None]

    def _seal_everything_read(self) -> None:
        if STATE.unsealed:
            self.seal()
            read = {external.address for external in self._externals}
            for weak in list(STATE.unsealed.values()):
                tape = weak()
                if tape is not None and any(s.data_ptr() in read for s in tape._kept):
                    tape.seal()

    def replay(self) -> None:
        """Raises StaleGraph if poison made an operation fail."""
        self._seal_everything_read()
        with quiet():
            held = [(external, external.hold()) for external in self._externals]  # held: nothing may die half way
            self.stale = [external.dead_read for external, storage in held if storage is None]
            try:
                if self._repeatable and not self.stale:
                    REPEATS.replay(self.number, self._reads, self._writes, self._ran_still)
                else:
                    self._run()
            except BaseException as error:
                for transient in (t for step in self._steps for t in step.last):
                    transient.drop()
                if self.stale and isinstance(error, (RuntimeError, IndexError)):
                    dead = ", ".join(map(str, self.stale))
                    raise StaleGraph(
                        f"the graph reads {len(self.stale)} storages whose owner is gone: {dead}; the garbage there made an operation "
                        f"fail ({error}); keep them alive, or capture again"
                    ) from error
                raise

    def _ran_still(self) -> bool:
        """Runs; returns whether nothing was drawn."""
        before = [(counter.seed, counter.offset) for counter in self._counters]
        self._run()
        return before == [(counter.seed, counter.offset) for counter in self._counters]

    def _run(self) -> None:
        enabled = False
        for call, args, kwargs, result, results, counter, grad, heavy, last in self._steps:
            if grad is not enabled:
                torch._C._set_grad_enabled(grad)
                enabled = grad
            if heavy is not None:
                out = REPEATS.result(heavy, call, args, kwargs, keep=not isinstance(result, Tensor))
            elif counter is None:
                out = call(*args, **kwargs)
            else:
                with drawing(counter, kwargs.get("generator")):
                    out = call(*args, **kwargs)
            if result is not None:
                put(out, result)
            elif results:
                for i, target in results:
                    put(flat_tensors(out)[i], target)
            del out
            for transient in last:
                transient.drop()
