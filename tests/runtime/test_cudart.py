"""CUDA's runtime by ctypes: what it is asked, what its answers mean, and when it is left alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from parity.runtime import cudart, nodes
from parity.runtime.cudart import CudaError, Cudart, Unfit
from parity.runtime.emulated import device

INVALID = 1
ILLEGAL_ADDRESS = 700


class Function:
    argtypes: Any = None
    restype: Any = None

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class Library:
    """A shared object that knows one graph: 1 before 2 and 3, and 4 by itself. ``lacks``: what it does not export."""

    def __init__(self, suffix: str = "", lacks: str = "") -> None:
        self.calls: list[Any] = []
        self.suffix, self.lacks = suffix, lacks

    def __getattr__(self, name: str) -> Function:
        if name == self.lacks or (name in ("cudaGraphGetEdges", "cudaGraphAddDependencies") and self.suffix):
            raise AttributeError(name)
        call = getattr(type(self), "do_" + name.removesuffix(self.suffix).lower(), lambda *_: 0)
        return Function(lambda *args: (self.calls.append(name), call(self, *args))[1])

    def _list(self, into: Any, count: Any, items: list[int]) -> int:
        if into is None:
            count._obj.value = len(items)
        else:
            for i, item in enumerate(items):
                into[i] = item
        return 0

    def do_cudagraphgetnodes(self, graph: int, into: Any, count: Any) -> int:
        return self._list(into, count, [1, 2, 3, 4])

    def do_cudagraphgetrootnodes(self, graph: int, into: Any, count: Any) -> int:
        return self._list(into, count, [1, 4])

    def do_cudagraphgetedges(self, graph: int, before: Any, after: Any, data: Any, count: Any) -> int:
        assert (before is None) == (data is None)  # without data edges of a programmatic launch cannot be read
        if after is not None:
            self._list(after, count, [2, 3])
        return self._list(before, count, [1, 1])

    def do_cudagraphaddmemcpynode1d(self, node: Any, *rest: Any) -> int:
        node._obj.value = 77
        self.calls.append((list(rest[1]), *rest[2:]))
        return {0: INVALID, 1: ILLEGAL_ADDRESS}.get(rest[3], 0)

    def do_cudagraphdestroynode(self, node: int) -> int:
        return INVALID

    def do_cudageterrorstring(self, code: int) -> bytes:
        return b"invalid argument"


@pytest.mark.parametrize(("major", "suffix"), [(12, "_v2"), (13, "")])
def test_a_graph_is_looked_into_and_added_to(major: int, suffix: str) -> None:
    library = Library(suffix)
    runtime = Cudart(library, major)
    assert runtime.roots(5) == [1, 4]
    assert runtime.ends(5) == [2, 3, 4]
    assert runtime.add(5, [2, 3, 4], 0x20, 0x10, 8) == 77
    assert library.calls[-1] == ([2, 3, 4], 3, 0x20, 0x10, 8, 3)
    runtime.depend(5, [77], [1])
    assert library.calls[-1] == "cudaGraphAddDependencies" + suffix


def test_an_error_is_told_in_cudas_words_and_forgotten() -> None:
    library = Library()
    runtime = Cudart(library, 13)
    with pytest.raises(Unfit, match="CUDA error 1: invalid argument"):
        runtime.add(5, [], 0, 0x10, 8)
    assert library.calls[-2:] == ["cudaGetLastError", "cudaGetErrorString"]
    with pytest.raises(CudaError) as caught:
        runtime.add(5, [], 1, 0x10, 8)
    assert type(caught.value) is CudaError
    assert caught.value.code == ILLEGAL_ADDRESS


def test_a_node_that_stays_is_never_spared() -> None:
    with pytest.raises(CudaError) as caught:
        Cudart(Library(), 13).destroy(77)
    assert type(caught.value) is CudaError


@pytest.fixture
def fresh() -> Iterator[None]:
    cudart.loaded.cache_clear()
    yield
    cudart.loaded.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_runtime_that_lacks_something_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Library())
    assert cudart.loaded() is not None
    cudart.loaded.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Library(lacks="cudaGraphDestroyNode"))
    assert cudart.loaded() is None


@pytest.mark.usefixtures("fresh")
def test_a_runtime_that_torch_has_not_loaded_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "999.0")
    assert cudart.loaded() is None


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("version", [None])
def test_a_build_without_cuda_has_none(monkeypatch: pytest.MonkeyPatch, version: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert cudart.loaded() is None


def test_on_the_emulated_device_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudart, "loaded", lambda: "CUDA's runtime")
    with device():
        assert nodes.available() is None
    if hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        assert nodes.available() == "CUDA's runtime"


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of torch for CUDA")
def test_the_runtime_that_torch_loads_has_all_it_takes() -> None:
    found = cudart.loaded()
    assert found is not None
    with pytest.raises(CudaError):
        found.roots(0)
