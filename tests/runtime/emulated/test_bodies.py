"""What runs below the modes: bodies of operators in Python, copies of whole storages, tensors of classes of their own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.runtime.emulated import device
from parity.runtime.errors import CaptureRefused


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with device(), torch.no_grad():
        yield


@torch.library.custom_op("parity_bodies::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    COUNT[0] += 1
    return x * COUNT[0]


@torch.library.custom_op("parity_bodies::mean_of", mutates_args=(), device_types="cuda")
def mean_of(x: Tensor) -> Tensor:
    return torch.full(x.shape, float(x.cpu().numpy().mean()), device=x.device)


COUNT = [0]
LIBRARY = torch.library.Library("parity_bodies_plain", "DEF")
LIBRARY.define("summed(Tensor x) -> Tensor")
LIBRARY.impl("summed", lambda x: x * float(x.sum()), "CUDA")


def captured(call: Callable[[Tensor], Any]) -> tuple[Any, Tensor, Any]:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    return graph, x, out


def test_a_replay_runs_what_a_body_launched_and_not_the_body() -> None:
    COUNT[0] = 1
    graph, x, out = captured(lambda x: scaled(x))
    assert COUNT == [2]
    x.fill_(5)
    graph.replay()
    assert COUNT == [2]
    assert out.tolist() == [10.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda x: mean_of(x), "d2h-copy"),
        (lambda x: torch.ops.parity_bodies_plain.summed(x), "host-sync"),
        (lambda x: torch.save(x, io.BytesIO()), "d2h-copy"),
        (lambda x: x.numpy(force=True), "d2h-copy"),
    ],
)
def test_what_reads_below_the_modes_is_refused(call: Callable[[Tensor], Any], cause: str) -> None:
    call(torch.ones(3, device="cuda"))
    with pytest.raises(CaptureRefused) as refused:
        captured(call)
    assert refused.value.cause == cause


@pytest.mark.parametrize("call", [copy.deepcopy, lambda x: torch.from_dlpack(x).clone()])
def test_copies_within_the_device_are_recorded(call: Callable[[Tensor], Any]) -> None:
    graph, x, out = captured(call)
    x.fill_(7)
    graph.replay()
    assert out.device.type == "cuda"
    assert out.tolist() == [7.0, 7.0, 7.0]


def test_two_views_of_one_storage_stay_so_when_copied_deeply() -> None:
    x = torch.ones(4, device="cuda")
    whole, part = copy.deepcopy([x, x[:2]])
    assert whole.untyped_storage()._cdata == part.untyped_storage()._cdata


def test_a_refusal_that_is_caught_is_kept_in_mind() -> None:
    def region(x: Tensor) -> Tensor:
        try:
            return x + torch.ones(3).to(x.device)
        except RuntimeError:
            return x * 2

    graph, _, _ = captured(region)
    assert [r.cause for r in graph.refused] == ["h2d-copy"]


def test_a_class_of_tensors_with_a_layout_of_its_own_is_asked_for_it() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, device="cpu")
    assert nested.layout is torch.jagged
