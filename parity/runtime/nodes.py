"""Copies into and out of a graph as nodes of that graph, told before each launch where to copy from and to.

Beside a graph such a copy costs the host more than the launch. As a node it costs one call of CUDA's runtime, and none where an
executable graph knows its addresses from an earlier call.

What CUDA says (Runtime API, "Graph Management", ``cudaGraphExecMemcpyNodeSetParams1D``): a change concerns later launches only, those
that run or are queued keep theirs; the node must stay in the graph that the executable one was made from, so torch has to keep that
(``keep_graph``); the memory must be of the same context, so the device of the graph has to be the current one; copies of no bytes are
not allowed, and are left out. Graphs are not thread-safe: the caller holds the lock of the pool.

Only with torch's own graphs on CUDA's runtime, as torch has loaded it. Where anything is missing, and on every other engine, there are
no such nodes, and copies are made beside the graph.

An executable graph that is destroyed while it runs is freed when it is done (``cudaGraphExecDestroy``).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.runtime import cudart
from parity.runtime.cudart import DEVICE_TO_DEVICE, Cudart, Unfit

_LOG = logging.getLogger("parity.runtime")


def available() -> Cudart | None:
    """CUDA's runtime, where graphs are torch's own and can be kept and looked into (torch 2.10 can); None elsewhere."""
    kind = torch.cuda.CUDAGraph
    native = issubclass(kind, torch._C._CUDAGraph) and all(
        hasattr(kind, name) for name in ("raw_cuda_graph", "raw_cuda_graph_exec", "instantiate")
    )
    return cudart.loaded() if native else None


def _empty() -> Callable[[Any, Any, torch.dtype], Tensor]:
    """An uninitialized tensor of a size, strides and dtype on the current device, from the current stream's memory. What compiled code
    allocates with costs half of ``torch.empty_strided``."""
    found: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    return found or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"))


@dataclass
class _Side:
    """An executable graph and the addresses it was told; 0 where none is known."""

    exec: int
    sources: list[int]
    targets: list[int]


class Copies:
    """The nodes of one graph. ``incoming``: (position among the leaves of a call, the graph's own tensor), empty where inputs are
    copied beside the graph; ``outgoing``: the graph's own results, empty likewise. All are in one piece and on the current device.

    ``twice``: whether a second executable graph may be made, and both launched by number: only where the region draws no random
    numbers, which torch's own ``replay`` cares for. Callers hold a result until they have the next, so that results come to lie in two
    places in turns; two that know one place each are told nothing. The second is made when results first lie elsewhere.

    A launch without ``tell`` before it writes over the results of the last call, or over what lies there by then."""

    def __init__(
        self,
        runtime: Cudart,
        graph: Any,
        incoming: list[tuple[int, Tensor]],
        outgoing: list[Tensor],
        leaves: Sequence[Any],
        twice: bool = False,
    ) -> None:
        """``leaves``: of some call; the graph is instantiated with their memory. Raises Unfit, the graph then as it was and
        instantiated, and CudaError."""
        self.takes, self.gives, self.numbered = bool(incoming), bool(outgoing), twice
        self._runtime, self._graph, self._twice = runtime, graph, twice
        self._device = torch.cuda.current_device()
        self._several = torch.cuda.device_count() > 1
        self._current = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self._empty = _empty()
        self._nodes: list[int] = []
        some = [torch.empty_like(x) for x in outgoing]
        raw = graph.raw_cuda_graph()
        try:
            arriving = self._arrive(raw, incoming, leaves)
            leaving = self._leave(raw, outgoing, some)
        except Unfit:
            self.withdraw()
            raise
        graph.instantiate()
        real = [(position, node, x) for (position, x), node in zip(incoming, arriving, strict=True) if node]
        self._positions = [position for position, _, _ in real]
        self._forms = [(tuple(x.shape), x.stride(), x.dtype) for x in outgoing]
        self._incoming = [(node, x.data_ptr(), _bytes(x)) for _, node, x in real]
        self._outgoing = [(node, x.data_ptr(), _bytes(x)) for x, node in zip(outgoing, leaving, strict=True)]
        self._first = [leaves[position].data_ptr() for position in self._positions], [x.data_ptr() for x in some]
        self._side = self._fresh(graph.raw_cuda_graph_exec())
        self._other: _Side | None = None

    def _fresh(self, executable: int) -> _Side:
        """With the addresses that the nodes were made with."""
        sources, targets = self._first
        return _Side(executable, list(sources), list(targets))

    def _arrive(self, raw: int, incoming: list[tuple[int, Tensor]], leaves: Sequence[Any]) -> list[int]:
        """Nodes that come one after the other before all others; 0 where there is nothing to copy."""
        roots, made = self._runtime.roots(raw), []
        last: list[int] = []
        for position, x in incoming:
            made.append(self._add(raw, last, x.data_ptr(), leaves[position].data_ptr(), _bytes(x)))
            last = [made[-1]] if made[-1] else last
        if last and roots:
            self._runtime.depend(raw, last * len(roots), roots)
        return made

    def _leave(self, raw: int, outgoing: list[Tensor], some: list[Tensor]) -> list[int]:
        """Nodes that come one after the other behind all others: branches would cost a launch more than they spare."""
        made, last = [], self._runtime.ends(raw) if outgoing else []
        for source, target in zip(outgoing, some, strict=True):
            made.append(self._add(raw, last, target.data_ptr(), source.data_ptr(), _bytes(source)))
            last = [made[-1]] if made[-1] else last
        return made

    def _add(self, raw: int, after: list[int], target: int, source: int, nbytes: int) -> int:
        if not nbytes:
            return 0
        node = self._runtime.add(raw, after, target, source, nbytes)
        self._nodes.append(node)
        return node

    def tell(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Sets the next launch to read the tensors among ``leaves`` and to write to fresh results, which it returns. Raises Unfit and
        CudaError; then no launch may follow before a ``tell`` that returns, or ``withdraw``."""
        if self._several and self._current() != self._device:
            with torch.cuda.device(self._device):
                return self.tell(leaves)
        empty = self._empty
        made = [empty(size, stride, dtype) for size, stride, dtype in self._forms]
        targets = [x.data_ptr() for x in made]
        sources = [leaves[position].data_ptr() for position in self._positions]
        side = self._side
        if side.targets != targets or (not targets and side.sources != sources):
            side = self._turn()
        if side.sources != sources:
            self._tell("where an input lies", side.exec, side.sources, sources, self._incoming, False)
        if side.targets != targets:
            self._tell("where a result goes", side.exec, side.targets, targets, self._outgoing, True)
        return made

    def _turn(self) -> _Side:
        """The executable graph that was not used last; it is the next to be used."""
        if self._other is None and self._twice:
            try:
                self._other = self._fresh(self._runtime.instantiate(self._graph.raw_cuda_graph()))
            except Unfit as reason:
                self._twice = False
                _LOG.info("cuda_graph: one executable graph has to do: %s", reason)
            else:
                weakref.finalize(self._other, self._runtime.end, self._other.exec).atexit = False  # CUDA ends with the process
        if self._other is not None:
            self._side, self._other = self._other, self._side
        return self._side

    def _tell(self, what: str, graph: int, known: list[int], wanted: list[int], copies: list[tuple[int, int, int]], out: bool) -> None:
        """Changes ``known`` to ``wanted``, where they differ, and one end of each of those ``copies``."""
        for i, (node, own, nbytes) in enumerate(copies):
            address = wanted[i]
            if address == known[i]:
                continue
            if node:
                known[i] = 0
                target, source = (address, own) if out else (own, address)
                if code := self._runtime.tell(graph, node, target, source, nbytes, DEVICE_TO_DEVICE):
                    self._runtime.check(what, code)
            known[i] = address

    def launch(self, stream: int) -> None:
        """By number, on the stream of that number. Raises CudaError."""
        self._runtime.launch(self._side.exec, stream)

    def withdraw(self) -> None:
        """Takes the nodes out of the graph, and instantiates it anew. Launches of the old one must be over. Raises CudaError."""
        with torch.cuda.device(self._device):
            while self._nodes:
                self._runtime.destroy(self._nodes.pop())
            self._graph.instantiate()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
