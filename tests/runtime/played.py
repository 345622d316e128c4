"""Graphs that are played on the host: kept ones, what is made executable of them, CUDA's calls on them, and an entry around them."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.runtime import nodes
from parity.runtime.buffers import Intake, Outlet
from parity.runtime.cudart import Cudart
from parity.runtime.liveness import Trace
from parity.runtime.nodes import Copies
from parity.runtime.record import Entry

INVALID = 1
ILLEGAL_ADDRESS = 700
OUT_OF_MEMORY = 2
STREAM = 77


class Exec:
    """What a launch runs: a copy of a graph. ``choose``: which of the nodes that may run comes next."""

    def __init__(self, graph: Graph) -> None:
        self.work, self.edges = dict(graph.work), set(graph.edges)

    def launch(self, choose: Callable[..., int] = max) -> None:
        left = dict(self.work)
        while left:
            node = choose(n for n in left if not any(b in left for b, a in self.edges if a == n))
            step = left.pop(node)
            if callable(step):
                step()
            else:
                ctypes.memmove(*step)


class Graph:
    """One that is kept: nodes are Python calls or copies, and a launch runs them in any order that the edges allow: the last one made
    first, which is wrong wherever an edge is missing."""

    def __init__(self, *region: Callable[[], Any]) -> None:
        self.work: dict[int, Any] = {i + 1: step for i, step in enumerate(region)}
        self.edges = {(i, i + 1) for i in range(1, len(region))}
        self.exec: Exec | None = None
        self.replays = 0

    def raw_cuda_graph(self) -> Any:
        return self

    def raw_cuda_graph_exec(self) -> Any:
        return self.exec

    def instantiate(self) -> None:
        self.exec = Exec(self)

    def replay(self) -> None:
        assert self.exec is not None
        self.replays += 1
        self.exec.launch()


class Runtime:
    """Cudart on such graphs. ``refuse``: the codes of the next calls that change a graph; ``broken``: that of every launch."""

    check = Cudart.check

    def __init__(self) -> None:
        self.graph: Any = None
        self.refuse: list[int] = []
        self.told = self.forgotten = self.broken = 0
        self.launches: list[Exec] = []
        self.ended: list[Exec] = []

    def _forget(self) -> None:
        self.forgotten += 1

    def _words(self, code: int) -> bytes:
        return b"said by CUDA"

    def _code(self) -> int:
        return self.refuse.pop(0) if self.refuse else 0

    def roots(self, graph: Graph) -> list[int]:
        return [n for n in graph.work if n not in {a for _, a in graph.edges}]

    def ends(self, graph: Graph) -> list[int]:
        return [n for n in graph.work if n not in {b for b, _ in graph.edges}]

    def add(self, graph: Graph, after: list[int], target: int, source: int, nbytes: int) -> int:
        self.check("a copy as a node", self._code())
        assert nbytes
        self.graph = graph
        node = 1000 + len(graph.work)
        graph.work[node] = target, source, nbytes
        graph.edges |= {(b, node) for b in after}
        return node

    def depend(self, graph: Graph, before: list[int], after: list[int]) -> None:
        graph.edges |= set(zip(before, after, strict=True))

    def destroy(self, node: int) -> None:
        del self.graph.work[node]
        self.graph.edges = {e for e in self.graph.edges if node not in e}

    def tell(self, executable: Exec, node: int, target: int, source: int, nbytes: int, kind: int) -> int:
        if code := self._code():
            return code
        assert kind == 3
        self.told += 1
        executable.work[node] = target, source, nbytes
        return 0

    def place(self, node: int, target: int, source: int, nbytes: int) -> None:
        self.check("a copy as a node", self._code())
        assert node in self.graph.work
        self.graph.work[node] = target, source, nbytes

    def instantiate(self, graph: Graph) -> Exec:
        self.check("another executable graph", self._code())
        return Exec(graph)

    def launch(self, executable: Exec, stream: int) -> int:
        assert stream == STREAM
        if self.broken:
            return self.broken
        self.launches.append(executable)
        executable.launch()
        return 0

    launched = Cudart.launched

    def end(self, executable: Exec) -> None:
        self.ended.append(executable)


class Pool:
    """One that nobody else uses. ``settled``: how often it was waited for."""

    settled = 0
    device = 0
    number: Any = STREAM

    def __init__(self) -> None:
        self.lock = threading.Lock()  # so that a leak shows
        self.current = lambda device: STREAM

    def begin(self) -> int:
        assert self.lock.acquire(blocking=False)
        return STREAM

    def end(self) -> None:
        self.lock.release()

    def settle(self) -> None:
        self.settled += 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Results are allocated on the host, and there is one device."""
    monkeypatch.setattr(nodes, "_empty", lambda: lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    with torch.no_grad():
        yield Runtime()


def entry_of(runtime: Any, leaves: list[Any], region: Callable[..., Any], clone: bool = True, numbered: bool = False) -> Entry:
    """What ``record`` makes of a region, whose graph calls it and writes over its first results. ``numbered``: it draws nothing."""
    intake = Intake(leaves)
    result = region(*intake.leaves)
    outlet = Outlet(result, intake.leaves, clone)
    statics = [x for x in outlet.leaves if isinstance(x, Tensor)]

    def again() -> None:
        results = Outlet(region(*intake.leaves), intake.leaves, False).leaves
        for static, new in zip(statics, [x for x in results if isinstance(x, Tensor)], strict=True):
            if static is not new:
                static.copy_(new)

    graph = Graph(lambda: None, again, lambda: None)
    copies = Copies(runtime, graph, intake.pieces(), outlet.pieces(set()), leaves, numbered)
    return Entry(graph, intake, outlet, Pool(), Trace(None, []), None, copies=copies)  # type: ignore[arg-type]
