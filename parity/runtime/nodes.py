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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from parity.runtime import cudart
from parity.runtime.cudart import DEVICE_TO_DEVICE, Cudart, Unfit

_LOG = logging.getLogger("parity.runtime")
EXECUTABLES: Final = 4
"""Of one graph. Each takes the device some memory per node."""


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

    ``several``: whether further executable graphs may be made, and all launched by number: only where the region draws no random
    numbers, which torch's own ``replay`` cares for. A caller holds a result until it has the next, so that results come to lie in a few
    places in turns; executable graphs that know one place each are told nothing. One is made whenever results lie where none of them
    writes, until there are ``EXECUTABLES``.

    ``known``: the executable graph that was told these addresses, of inputs and then of results.

    A launch without ``tell`` before it writes over the results of the last call, or over what lies there by then."""

    def __init__(
        self,
        runtime: Cudart,
        graph: Any,
        incoming: list[tuple[int, Tensor]],
        outgoing: list[Tensor],
        leaves: Sequence[Any],
        several: bool = False,
    ) -> None:
        """``leaves``: of some call; the graph is instantiated with their memory. Raises Unfit, the graph then as it was and
        instantiated, and CudaError."""
        self.takes, self.gives, self.numbered = bool(incoming), bool(outgoing), several
        self.runtime, self._graph = runtime, graph
        self._spare = EXECUTABLES - 1 if several else 0
        self.device = torch.cuda.current_device()
        self.devices = torch.cuda.device_count()
        self.current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self.empty = _empty()
        self.known: dict[tuple[int, ...], int] = {}
        self._nodes: list[int] = []
        self._ending: list[Any] = []  # what ends the further executable graphs
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
        self.positions = [position for position, _, _ in real]
        self._ends = [(node, x.data_ptr(), _bytes(x)) for _, node, x in real]
        self._ends += [(node, x.data_ptr(), _bytes(x)) for x, node in zip(outgoing, leaving, strict=True)]
        self.forms = [(tuple(x.shape), x.stride(), x.dtype) for x in outgoing]
        first = [*(leaves[position].data_ptr() for position in self.positions), *(x.data_ptr() for x in some)]
        self._next: int = graph.raw_cuda_graph_exec()
        self._told: dict[int, list[int]] = {self._next: first}  # the one that was told the longest ago comes first
        self.known[tuple(first)] = self._next

    def _arrive(self, raw: int, incoming: list[tuple[int, Tensor]], leaves: Sequence[Any]) -> list[int]:
        """Nodes that come one after the other before all others; 0 where there is nothing to copy."""
        roots, made = self.runtime.roots(raw), []
        last: list[int] = []
        for position, x in incoming:
            made.append(self._add(raw, last, x.data_ptr(), leaves[position].data_ptr(), _bytes(x)))
            last = [made[-1]] if made[-1] else last
        if last and roots:
            self.runtime.depend(raw, last * len(roots), roots)
        return made

    def _leave(self, raw: int, outgoing: list[Tensor], some: list[Tensor]) -> list[int]:
        """Nodes that come one after the other behind all others: branches would cost a launch more than they spare."""
        made, last = [], self.runtime.ends(raw) if outgoing else []
        for source, target in zip(outgoing, some, strict=True):
            made.append(self._add(raw, last, target.data_ptr(), source.data_ptr(), _bytes(source)))
            last = [made[-1]] if made[-1] else last
        return made

    def _add(self, raw: int, after: list[int], target: int, source: int, nbytes: int) -> int:
        if not nbytes:
            return 0
        node = self.runtime.add(raw, after, target, source, nbytes)
        self._nodes.append(node)
        return node

    def elsewhere(self) -> bool:
        """Whether the current device is not that of the graph."""
        return self.devices > 1 and self.current() != self.device

    def tell(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Sets the next launch to read the tensors among ``leaves`` and to write to fresh results, which it returns. Raises Unfit and
        CudaError; then no launch may follow before a ``tell`` that returns, or ``withdraw``."""
        if self.elsewhere():
            with torch.cuda.device(self.device):
                return self.tell(leaves)
        made = [self.empty(size, stride, dtype) for size, stride, dtype in self.forms]
        addresses = (*[leaves[position].data_ptr() for position in self.positions], *[x.data_ptr() for x in made])
        self._next = self.known.get(addresses) or self.aim(addresses)
        return made

    def aim(self, addresses: tuple[int, ...]) -> int:
        """The executable graph that was told others the longest ago, told these ``addresses``. Raises as ``tell`` does."""
        if not self._nodes:
            raise Unfit("copies as nodes of a graph", 0, "they were withdrawn")
        executable = self._another(addresses) if self._spare else 0
        if not executable:
            executable = next(iter(self._told))
            told = self._told[executable] = self._told.pop(executable)
            self.known.pop(tuple(told), None)
            for i, (node, target, source, nbytes) in enumerate(self._copies(addresses)):
                if node and addresses[i] != told[i]:
                    told[i] = 0
                    if code := self.runtime.tell(executable, node, target, source, nbytes, DEVICE_TO_DEVICE):
                        self.runtime.check("where an input lies" if i < len(self.positions) else "where a result goes", code)
                told[i] = addresses[i]
        self.known[addresses] = executable
        return executable

    def _copies(self, addresses: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
        """Node, target, source, bytes of each copy, where inputs and results lie there."""
        for i, ((node, own, nbytes), address) in enumerate(zip(self._ends, addresses, strict=True)):
            yield (node, own, address, nbytes) if i < len(self.positions) else (node, address, own, nbytes)

    def _another(self, addresses: tuple[int, ...]) -> int:
        """Another executable graph, made with these addresses; 0 where there is no room for it. Those that the graph holds may be
        nobody's by now, and CUDA has been seen to crash where they probably were."""
        try:
            for node, target, source, nbytes in self._copies(addresses):
                if node:
                    self.runtime.place(node, target, source, nbytes)
            executable = self.runtime.instantiate(self._graph.raw_cuda_graph())
        except Unfit as reason:
            self._spare = 0
            _LOG.info("cuda_graph: %d executable graphs have to do: %s", len(self._told), str(reason))
            return 0
        self._spare -= 1
        self._ending.append(weakref.finalize(self, self.runtime.end, executable))
        self._ending[-1].atexit = False  # CUDA ends with the process
        self._told[executable] = list(addresses)
        return executable

    def launch(self, stream: int) -> None:
        """What ``tell`` has set, by number, on the stream of that number. Raises CudaError."""
        if self.elsewhere():  # the default streams of all devices have one number
            with torch.cuda.device(self.device):
                return self.launch(stream)
        if code := self.runtime.launch(self._next, stream):
            self.runtime.launched(code)

    def withdraw(self) -> None:
        """Takes the nodes out of the graph, and instantiates it anew. Launches of the old one must be over. Raises CudaError."""
        with torch.cuda.device(self.device):
            self.known.clear()
            added, self._nodes = self._nodes, []
            for end in self._ending:
                end()
            for node in added:
                self.runtime.destroy(node)
            self._graph.instantiate()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
