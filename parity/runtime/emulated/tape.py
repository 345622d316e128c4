"""The recorded operations of one capture, with the storages that they read and write, and their replay.

What the capture allocated is owned and kept alive. Everything else is known by address and held weakly, as a CUDA graph holds it: once
freed, or moved, a replay reads poison there and says so. A capture computes (later captures need sensible shapes and indices) but must
seem to have computed nothing: what it wrote outside is undone at its end, and what it owns is poisoned when somebody first looks: at
the first replay, or at the first operation outside a capture that reads it. Memory is never reused within a tape or between tapes.
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

from .addresses import POISON, DeadRead, External, Ref, filled, refs_in
from .generators import Counter, drawing
from .memory import Block, block_of
from .plans import Plan
from .state import STATE, quiet

_numbers = itertools.count(1)
aten = torch.ops.aten


@dataclass
class _Op:
    func: OpOverload[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    counter: Counter | None
    grad: bool  # some kernels keep a workspace for backward if gradients are enabled
    results: list[tuple[int, Ref]] = field(default_factory=list)
    single: bool = False  # it returns one tensor, not a list


class _Step(NamedTuple):
    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor | None  # where the only result goes
    results: tuple[tuple[int, Tensor], ...]  # or where several go
    counter: Counter | None
    grad: bool


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
        self.owned: dict[int, UntypedStorage] = {}
        self.stale: list[DeadRead] = []
        self.sealed = False
        self._ops: list[_Op] = []
        self._refs: dict[tuple[Any, ...], Ref] = {}
        self._undo: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self._externals: list[External] = []
        self._steps: list[_Step] = []

    def __len__(self) -> int:
        return len(self._steps) or len(self._ops)

    # ------------------------------------------------------------ recording
    def begin(
        self, func: OpOverload[..., Any], plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], counter: Counter | None
    ) -> _Op | None:
        """Before the operation runs. None: it launches no kernel."""
        if not plan.recorded:
            return None
        for tensor in plan.written(args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.owned and storage._cdata not in self._undo:
                self._undo[storage._cdata] = (storage, storage.clone())
        note = self._noted
        return _Op(func, [note(a, plan) for a in args], {k: note(v, plan) for k, v in kwargs.items()}, counter, torch.is_grad_enabled())

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
        key = (
            cdata, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        )  # fmt: skip
        ref = self._refs.get(key)
        if ref is None:  # an alias made below autograd: later changes of the tensor's own metadata do not reach it
            ref = self._refs[key] = Ref(aten.alias.default(tensor), cdata)
        return ref

    def own(self, storage: UntypedStorage) -> None:
        self.owned[storage._cdata] = storage

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
        externals: dict[int, External] = {}
        with quiet():
            for ref in self._used():
                if ref.key not in self.owned:
                    if ref.key not in externals:
                        externals[ref.key] = External(ref.tensor.untyped_storage())
                    externals[ref.key].adopt(ref)
        self._externals = list(externals.values())
        for op in self._ops:
            results = tuple((i, ref.tensor) for i, ref in op.results)
            args, kwargs = tuple(filled(a) for a in op.args), {k: filled(v) for k, v in op.kwargs.items()}
            call = getattr(op.func, "_op", op.func)
            plain = op.single and bool(results)
            self._steps.append(
                _Step(call, args, kwargs, results[0][1] if plain else None, () if plain else results, op.counter, op.grad)
            )
        self._ops, self._refs = [], {}
        number = self.number
        STATE.unsealed[number] = weakref.ref(self, lambda _: STATE.unsealed.pop(number, None))

    def _used(self) -> Iterable[Ref]:
        """What recorded operations look at, in their order, each once."""
        found: dict[int, Ref] = {}
        for op in self._ops:
            for ref in [*refs_in(op.args), *refs_in(op.kwargs.values()), *(ref for _, ref in op.results)]:
                found[id(ref)] = ref
        return found.values()

    # ------------------------------------------------------------ sealing
    def poison(self, byte: int = POISON) -> None:
        with quiet():
            for storage in self.owned.values():
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
                if tape is not None and any(s.data_ptr() in read for s in tape.owned.values()):
                    tape.seal()

    def replay(self) -> None:
        """Raises StaleGraph if poison made an operation fail."""
        self._seal_everything_read()
        with quiet():
            held = [(external, external.hold()) for external in self._externals]  # held: nothing may die half way
            self.stale = [external.dead_read for external, storage in held if storage is None]
            try:
                self._run()
            except (RuntimeError, IndexError) as error:
                if self.stale:
                    dead = ", ".join(map(str, self.stale))
                    raise StaleGraph(
                        f"the graph reads {len(self.stale)} storages whose owner is gone: {dead}; the garbage there made an operation "
                        f"fail ({error}); keep them alive, or capture again"
                    ) from error
                raise

    def _run(self) -> None:
        enabled = False
        for call, args, kwargs, result, results, counter, grad in self._steps:
            if grad is not enabled:
                torch._C._set_grad_enabled(grad)
                enabled = grad
            if counter is None:
                out = call(*args, **kwargs)
            else:
                with drawing(counter, kwargs.get("generator")):
                    out = call(*args, **kwargs)
            if result is not None:
                result.copy_(out)
            elif results:
                leaves = flat_tensors(out)
                for i, target in results:
                    target.copy_(leaves[i])
