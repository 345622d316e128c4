"""The dispatch mode: on which device an operation runs, what a GPU would refuse, and what is recorded. Forward and backward alike."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from parity.runtime.legality import tensors_in, violation
from parity.runtime.within import body_of

from .calls import FunctionMode, has_device
from .generators import counter_for, drawing
from .memory import Block, block_of, is_marked, is_pinned, mark, pin
from .plans import Plan, plan_of
from .repeats import REPEATS, still
from .state import CPU, STATE
from .tape import flat_tensors, look

_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd


def _mixed_devices(name: str) -> RuntimeError:
    return RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})")


def _placed(plan: Plan, args: Any, kwargs: Any, tensors: list[Tensor], blocks: list[Block | None]) -> None:
    """Raises where a GPU would: a host operand beside a device operand. Numbers (zero dimensions) may come from the host."""
    if plan.mixed:
        return
    if plan.indexed:
        if blocks[0] is None:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if len(args) > 2 and isinstance(args[2], Tensor) and args[2].dim() > 0 and not is_marked(args[2]):
            raise _mixed_devices(plan.name)
        return
    if None in blocks:
        if any(block is None and t.dim() > 0 for t, block in zip(tensors, blocks, strict=True)):
            raise _mixed_devices(plan.name)
        if plan.writes and not all(is_marked(t) for t in plan.written(args, kwargs)):
            raise _mixed_devices(plan.name)


class DispatchMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; torch's guard against it costs microseconds per operation."""
        return False

    def __torch_dispatch__(self, func: OpOverload[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan = plan_of(func)
        if plan.composite:  # under inference mode composites arrive whole; what is judged and recorded are their parts
            with self:  # torch's own C++ body: a Python decomposition may be another computation
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if plan.python is not None and has_device((*args, *kwargs.values())):  # a capture runs its body and records what that launches
            body = body_of(func)
            with self:
                if body is None:  # not to be had without the dispatcher, which must not meet a function mode on the way
                    return func._op_dk(plan.python, *args, **kwargs)
                with FunctionMode():  # type: ignore[no-untyped-call, unused-ignore]
                    return body(*args, **kwargs)
        force = STATE.force
        asked = kwargs.get("device")
        if asked is not None and asked.type == "cuda":  # from Python code that runs below the function mode
            force, kwargs = "cuda", {**kwargs, "device": CPU}
            if plan.transfer and STATE.graph is not None:
                STATE.refuse(violation(func, args, {**kwargs, "device": asked}, is_marked, is_pinned))
        tensors = list(tensors_in(args))
        if kwargs:
            tensors += tensors_in(kwargs.values())
        blocks = [block_of(t) for t in tensors]
        touches = any(b is not None for b in blocks)
        if touches:
            _placed(plan, args, kwargs, tensors, blocks)
        if plan.copies:
            device = blocks[0] is not None
        elif force is not None:
            device = force == "cuda"
        else:
            device = touches if tensors else STATE.context
        if not (device or touches):
            return func(*args, **kwargs)
        graph = STATE.graph
        if graph is not None:
            if plan.copies or not plan.transfer:  # what goes from device to device by _to_copy was judged where it was asked for
                STATE.refuse(violation(func, args, kwargs, is_marked, is_pinned))
            if not graph.captures(STATE.stream):
                graph.foreign(plan.name)
                graph = None  # a stream that never joined the capture: the kernel runs now and is not in the graph
        elif STATE.unsealed and not plan.blind:
            look(blocks)
        counter = counter_for(kwargs.get("generator")) if plan.seeded and device else None
        op = None
        if graph is not None:
            graph.launch(plan, STATE.stream)
            op = graph.tape.begin(func, plan, args, kwargs, counter)
        if plan.heavy and not torch.is_grad_enabled() and still(func, args):
            out = REPEATS.result(func, func, args, kwargs, keep=True)
        elif counter is None:
            out = func(*args, **kwargs)
        else:
            with drawing(counter, kwargs.get("generator")):
                out = func(*args, **kwargs)
        fresh = self._results(plan, out, device, graph, tensors)
        if op is not None and graph is not None:
            graph.tape.end(op, plan, out, fresh)
        return out

    @staticmethod
    def _results(plan: Plan, out: Any, device: bool, graph: Any, tensors: list[Tensor]) -> list[tuple[int, Tensor]]:
        """Marks what was allocated; returns it with its place among the results."""
        if out is None:
            return []
        fresh: list[tuple[int, Tensor]] = []
        for i, t in enumerate((out,) if isinstance(out, Tensor) else flat_tensors(out)):
            if not isinstance(t, Tensor) or i in plan.hosted:
                continue
            if device and block_of(t) is None:
                if t.layout is not torch.strided:
                    raise NotImplementedError(f"the emulated device holds strided tensors only, and {plan.name} made a {t.layout} one")
                storage = t.untyped_storage()
                mark(storage, graph.tape.number if graph is not None else 0)
                if graph is not None:
                    graph.tape.own(storage)
                fresh.append((i, t))
            elif not device and not any(t is operand for operand in tensors):
                if plan.transfer:  # a copy to the host that a capture may record: torch makes it pinned
                    pin(t)
                fresh.append((i, t))
        return fresh
