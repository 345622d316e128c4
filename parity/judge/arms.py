"""The ways to run a row. Each is a callable of the forward's arguments that captures at the first call of a signature, so that the
protocol does not know which one it judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from parity.judge.subject import BrokenRow, blamed
from parity.rows.family import Subject
from parity.runtime import rng, tree
from parity.runtime.liveness import Trace, trace
from parity.runtime.refusal import explain
from parity.runtime.runner import GraphRunner
from parity.runtime.signature import Signature, signature
from parity.runtime.state import kept


class Arm(Protocol):
    """``traces``: one per signature captured, what the region read then."""

    traces: list[Trace]

    def __call__(self, *args: Any) -> Any:
        """A forward the way this arm runs it. Raises CaptureRefused where its capture is refused."""

    def statics(self) -> list[Tensor] | None:
        """The tensors the arm itself keeps of its graphs, inputs and outputs; None where they cannot be told."""


class EagerArm:
    """The reference. As an arm of its own it must end as ``not_graphed``."""

    def __init__(self, subject: Subject) -> None:
        self.traces: list[Trace] = []
        self._forward = subject.compose(subject.region)

    def __call__(self, *args: Any) -> Any:
        return self._forward(*args)

    def statics(self) -> list[Tensor] | None:
        return []


def _fill(statics: list[Any], given: list[Any]) -> None:
    for static, value in zip(statics, given, strict=True):
        if isinstance(static, Tensor):
            static.copy_(value)


@dataclass
class _Recorded:
    graph: Any
    inputs: list[Any]
    output: Any

    def replay(self, args: Any) -> Any:
        _fill(self.inputs, tree.flatten(args)[0])
        self.graph.replay()
        return tree.cloned(self.output)


class BareArm:
    """torch's own capture with warm-up undone and nothing of ours: no liveness, no invalidation. It warms up on the tensors that the
    graph will read, as torch's documentation has it. Arguments that are no tensors stay
    what they were at capture, as they do for whoever wraps a callable in torch.cuda.graph. Results are cloned out of the graph."""

    def __init__(self, subject: Subject, warmup: int = 2) -> None:
        self.traces: list[Trace] = []
        self._subject = subject
        self._warmup = warmup
        self._recorded: dict[Signature, _Recorded] = {}
        self._pool: Any = None
        self._forward = subject.compose(self._region)

    def __call__(self, *args: Any) -> Any:
        return self._forward(*args)

    def _region(self, *args: Any) -> Any:
        leaves, spec = tree.flatten(args)
        key = signature([x if isinstance(x, Tensor) else type(x) for x in leaves], spec)
        if key not in self._recorded:
            self._recorded[key] = self._record(args)
        return self._recorded[key].replay(args)

    def _record(self, args: Any) -> _Recorded:
        region, module = self._subject.region, self._subject.module
        given = tree.flatten(args)[0]
        static, spec = tree.flatten(tree.cloned(args))

        def again() -> Any:
            """The arguments, in the tensors that the graph will read; each call may change the containers that it is given."""
            _fill(static, given)
            return tree.unflatten(static, spec)

        streams = rng.save()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with kept(module), torch.cuda.stream(stream):
                for _ in range(self._warmup - 1):
                    region(*again())
                traced = trace(region, again(), module)
            torch.cuda.current_stream().wait_stream(stream)
        finally:
            rng.restore(streams)
        traced.result = None
        graph, statics = torch.cuda.CUDAGraph(), again()
        try:
            with (
                kept(module),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                output = region(*statics)
        except Exception as error:
            raise explain(error, traced) from error
        rng.restore(streams)
        self._pool = graph.pool()
        self.traces.append(traced)
        return _Recorded(graph, static, output)

    def statics(self) -> list[Tensor] | None:
        held = [x for r in self._recorded.values() for x in [*r.inputs, *tree.flatten(r.output)[0]]]
        return [x for x in held if isinstance(x, Tensor)]


class GraphedArm:
    """Our runtime, strict: what it would quietly run eagerly is a refusal here."""

    def __init__(self, subject: Subject) -> None:
        self.runner = GraphRunner(subject.region, subject.module)
        self._forward = subject.compose(self._region)

    @property
    def traces(self) -> list[Trace]:
        return [e.traced for e in self.runner.entries()]

    def __call__(self, *args: Any) -> Any:
        return self._forward(*args)

    def _region(self, *args: Any) -> Any:
        self.runner.capture(*args)
        return self.runner(*args)

    def statics(self) -> list[Tensor] | None:
        held = [x for e in self.runner.entries() for x in [*e.inputs, *e.outputs]]
        return [x for x in held if isinstance(x, Tensor)]


class NativeArm:
    """The zoo's own path. It warms up and captures by itself; what its region reads is traced before, side effects undone."""

    def __init__(self, subject: Subject) -> None:
        if subject.native is None:
            raise BrokenRow("this family has no capture path of its own: it declares an arm 'native', but its Subject has none")
        self.traces: list[Trace] = []
        self._subject = subject
        with blamed(lambda: "native()"):
            self._native = subject.native()
        self._seen: set[Signature] = set()

    def __call__(self, *args: Any) -> Any:
        key = signature(*tree.flatten(args))
        if key in self._seen:
            return self._native(*args)
        traced = self._trace(args)
        try:
            result = self._native(*args)
        except Exception as error:
            raise explain(error, traced) from error
        self._seen.add(key)
        self.traces.append(traced)
        return result

    def _trace(self, args: Any) -> Trace:
        traced = Trace()

        def watched(*values: Any) -> Any:
            nonlocal traced
            traced = trace(self._subject.region, values, self._subject.module)
            return traced.result

        streams = rng.save()
        try:
            with kept(self._subject.module):
                self._subject.compose(watched)(*tree.cloned(args))
        finally:
            rng.restore(streams)
        traced.result = None
        return traced

    def statics(self) -> list[Tensor] | None:
        return None


ARMS = {"eager": EagerArm, "bare": BareArm, "graphed": GraphedArm, "native": NativeArm}
