"""Copies into and out of a graph as nodes of that graph, told before each launch where to copy from and to.

Beside a graph such a copy costs the host more than the launch. As a node it costs one call of CUDA's runtime, and none where its
addresses are those of the last call.

What CUDA says (Runtime API, "Graph Management", ``cudaGraphExecMemcpyNodeSetParams1D``): a change concerns later launches only, those
that run or are queued keep theirs; the node must stay in the graph that the executable one was made from, so torch has to keep that
(``keep_graph``); the memory must be of the same context, so the device of the graph has to be the current one; copies of no bytes are
not allowed, and are left out. Graphs are not thread-safe: the caller holds the lock of the pool.

Only with torch's own graphs on CUDA's runtime, as torch has loaded it. Where anything is missing, and on every other engine, there are
no such nodes, and copies are made beside the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.runtime import cudart
from parity.runtime.cudart import DEVICE_TO_DEVICE, Cudart, Unfit


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


class Copies:
    """The nodes of one graph. ``incoming``: (position among the leaves of a call, the graph's own tensor), empty where inputs are
    copied beside the graph; ``outgoing``: the graph's own results, empty likewise. All are in one piece and on the current device.

    A launch without ``tell`` before it writes over the results of the last call, or over what lies there by then."""

    def __init__(
        self, runtime: Cudart, graph: Any, incoming: list[tuple[int, Tensor]], outgoing: list[Tensor], leaves: Sequence[Any]
    ) -> None:
        """``leaves``: of some call; the graph is instantiated with their memory. Raises Unfit, the graph then as it was and
        instantiated, and CudaError."""
        self.takes, self.gives = bool(incoming), bool(outgoing)
        self._runtime, self._graph = runtime, graph
        self._device = torch.cuda.current_device()
        self._several = torch.cuda.device_count() > 1
        self._current = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self._empty = _empty()
        self._tell = runtime.tell
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
        self._exec: int = graph.raw_cuda_graph_exec()
        self._incoming = [
            (position, node, x.data_ptr(), _bytes(x)) for (position, x), node in zip(incoming, arriving, strict=True) if node
        ]
        self._outgoing = [
            (i, tuple(x.shape), x.stride(), x.dtype, node, x.data_ptr(), _bytes(x))
            for i, (x, node) in enumerate(zip(outgoing, leaving, strict=True))
        ]
        self._from = [0] * len(self._incoming)
        self._to = [0] * len(self._outgoing)

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
        tell, graph = self._tell, self._exec
        known = self._from
        for i, (position, node, target, nbytes) in enumerate(self._incoming):
            address = leaves[position].data_ptr()
            if address != known[i]:
                known[i] = 0
                if code := tell(graph, node, target, address, nbytes, DEVICE_TO_DEVICE):
                    self._runtime.check("where an input lies", code)
                known[i] = address
        made, known, empty = [], self._to, self._empty
        for i, size, stride, dtype, node, source, nbytes in self._outgoing:
            fresh = empty(size, stride, dtype)
            made.append(fresh)
            address = fresh.data_ptr()
            if address != known[i] and nbytes:
                known[i] = 0
                if code := tell(graph, node, address, source, nbytes, DEVICE_TO_DEVICE):
                    self._runtime.check("where a result goes", code)
                known[i] = address
        return made

    def withdraw(self) -> None:
        """Takes the nodes out of the graph, and instantiates it anew. Launches of the old one must be over. Raises CudaError."""
        with torch.cuda.device(self._device):
            while self._nodes:
                self._runtime.destroy(self._nodes.pop())
            self._graph.instantiate()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
