"""CUDA's runtime as torch has loaded it: what it takes to look into a kept graph, to add copies to it and tell them addresses.

Called by ctypes, which is imported with the first graph that is captured on a device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from parity.runtime.errors import ParityError

_LOG = logging.getLogger("parity.runtime")
DEVICE_TO_DEVICE: Final = 3
_UNFIT: Final = frozenset({1, 2, 801, 910})
"""cudaErrorInvalidValue, cudaErrorMemoryAllocation, cudaErrorNotSupported, cudaErrorGraphExecUpdateFailure: CUDA does not take these
nodes or this memory, or has no room for them, and nothing else is wrong."""
_AUTO_FREE: Final = 1
"""cudaGraphInstantiateFlagAutoFreeOnLaunch, with which torch instantiates its own; priorities of captured streams are not kept."""
_RELAXED: Final = 2
"""cudaStreamCaptureModeRelaxed."""


class CudaError(ParityError, RuntimeError):
    """A call of CUDA's runtime failed."""

    def __init__(self, what: str, code: int, words: str) -> None:
        super().__init__(f"{what}: CUDA error {code}: {words}")
        self.code = code


class Unfit(CudaError):
    """CUDA does not take what was asked; copies beside the graph will do."""


class Cudart:
    """Functions of CUDA's runtime on the nodes of a graph, by addresses as numbers. All raise CudaError.

    ``library``: the loaded shared object. Raises AttributeError where it lacks a function."""

    def __init__(self, library: Any, major: int) -> None:
        import ctypes

        self._ctypes, self._library = ctypes, library
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

        def function(name: str, *kinds: Any) -> Any:
            found = getattr(library, name)
            found.argtypes, found.restype = kinds, number
            return found

        # with the data of edges, without which those of a programmatic launch cannot be read: CUDA 12 has them under names of their own
        suffix = "" if major >= 13 else "_v2"
        self._nodes = function("cudaGraphGetNodes", pointer, pointer, pointer)
        self._roots = function("cudaGraphGetRootNodes", pointer, pointer, pointer)
        self._edges = function("cudaGraphGetEdges" + suffix, pointer, pointer, pointer, pointer, pointer)
        self._depend = function("cudaGraphAddDependencies" + suffix, pointer, pointer, pointer, pointer, size)
        self._add = function("cudaGraphAddMemcpyNode1D", pointer, pointer, pointer, size, pointer, pointer, size, number)
        self._place = function("cudaGraphMemcpyNodeSetParams1D", pointer, pointer, pointer, size, number)
        self._destroy = function("cudaGraphDestroyNode", pointer)
        self._instantiate = function("cudaGraphInstantiateWithFlags", pointer, pointer, ctypes.c_ulonglong)
        self._end = function("cudaGraphExecDestroy", pointer)
        self._mode = function("cudaThreadExchangeStreamCaptureMode", pointer)
        self._forget = function("cudaGetLastError")
        self._words = function("cudaGetErrorString", number)
        self._words.restype = ctypes.c_char_p
        self.tell: Callable[[int, int, int, int, int, int], int] = function(
            "cudaGraphExecMemcpyNodeSetParams1D", pointer, pointer, pointer, pointer, size, number
        )
        """Executable graph, node, destination, source, bytes, kind; returns an error code."""
        self.launch: Callable[[int, int], int] = function("cudaGraphLaunch", pointer, pointer)
        """Executable graph, stream; returns an error code."""

    def check(self, what: str, code: int, spare: bool = True) -> None:
        """Raises Unfit, where one can do without (``spare``) and CUDA refused no more than that, and CudaError."""
        if code:
            self._forget()  # or torch would take it for that of its next call
            words = self._words(code)
            raise (Unfit if spare and code in _UNFIT else CudaError)(what, code, words.decode() if words else "")

    def _array(self, items: Sequence[int]) -> Any:
        return (self._ctypes.c_void_p * len(items))(*items)

    def _listed(self, what: str, function: Any, graph: int) -> list[int]:
        count = self._ctypes.c_size_t()
        self.check(what, function(graph, None, self._ctypes.byref(count)))
        found = self._array([0] * count.value)
        if count.value:
            self.check(what, function(graph, found, self._ctypes.byref(count)))
        return list(found)

    def roots(self, graph: int) -> list[int]:
        return self._listed("the first nodes of a graph", self._roots, graph)

    def ends(self, graph: int) -> list[int]:
        """Nodes that no other waits for."""
        count = self._ctypes.c_size_t()
        what = "the edges of a graph"
        self.check(what, self._edges(graph, None, None, None, self._ctypes.byref(count)))
        before, after = self._array([0] * count.value), self._array([0] * count.value)
        if count.value:
            data = (self._ctypes.c_uint64 * count.value)()
            self.check(what, self._edges(graph, before, after, data, self._ctypes.byref(count)))
        waited = set(before)
        return [node for node in self._listed("the nodes of a graph", self._nodes, graph) if node not in waited]

    def add(self, graph: int, after: Sequence[int], target: int, source: int, nbytes: int) -> int:
        node = self._ctypes.c_void_p()
        code = self._add(self._ctypes.byref(node), graph, self._array(after), len(after), target, source, nbytes, DEVICE_TO_DEVICE)
        self.check("a copy as a node", code)
        return int(node.value or 0)

    def depend(self, graph: int, before: Sequence[int], after: Sequence[int]) -> None:
        self.check("an edge of a graph", self._depend(graph, self._array(before), self._array(after), None, len(after)))

    def place(self, node: int, target: int, source: int, nbytes: int) -> None:
        """Changes a node of the graph itself, for what is instantiated of it later."""
        self.check("a copy as a node", self._place(node, target, source, nbytes, DEVICE_TO_DEVICE))

    def instantiate(self, graph: int) -> int:
        """An executable graph, for ``end`` to end."""
        executable = self._ctypes.c_void_p()
        with self._relaxed():
            code = self._instantiate(self._ctypes.byref(executable), graph, _AUTO_FREE)
        self.check("another executable graph", code)
        return int(executable.value or 0)

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Within it this thread may allocate and free while somebody captures, as torch does around what it instantiates and frees."""
        mode = self._ctypes.c_int(_RELAXED)
        self.check("the capture mode of a thread", self._mode(self._ctypes.byref(mode)), spare=False)
        try:
            yield
        finally:
            self._mode(self._ctypes.byref(mode))  # has the one from before

    def launched(self, code: int) -> None:
        self.check("the launch of a graph", code, spare=False)

    def end(self, executable: int) -> None:
        """Frees an executable graph once it does not run any more. An error that CUDA reports here is one of earlier launches, whose
        owners hear of it."""
        with self._relaxed():
            code = self._end(executable)
        if code:
            self._forget()

    def destroy(self, node: int) -> None:
        self.check("taking a node out of a graph", self._destroy(node), spare=False)


@functools.cache
def loaded() -> Cudart | None:
    """The runtime that torch uses; None where there is none, or where it lacks a function."""
    if torch.version.cuda is None or not hasattr(os, "RTLD_NOLOAD"):  # a build for ROCm or for a CPU; a system without such loading
        return None
    import ctypes

    major = int(torch.version.cuda.split(".")[0])
    try:  # only what torch has loaded: a second runtime would know nothing of its graphs
        return Cudart(ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW), major)
    except (OSError, AttributeError) as missing:
        _LOG.info("cuda_graph: copies stay beside their graphs: %s", missing)
        return None
