"""A tape keeps no memory for what is dead when its capture ends, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from parity.runtime import emulated
from parity.runtime.emulated.addresses import layout_of
from parity.runtime.emulated.transient import SMALL, Transient, Use

SIDE = 256
assert SIDE * SIDE * 4 >= SMALL


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with emulated.device(), torch.no_grad():
        yield


def _program(x: Tensor) -> Tensor:
    y = (x + 1).relu_()
    y.mul_(x)  # written in place after its birth
    turned = y.t().contiguous() - y.view(-1, SIDE)[:1]
    values, order = turned.sort(dim=0)
    low, high = torch.var_mean(values + order, dim=1, keepdim=True)
    return torch.cat([values * low, (turned / (high + 1)).cumsum(0)])


def _captured(region: Callable[[Tensor], Tensor], x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = region(x)
    return graph, out


def _kept(graph: torch.cuda.CUDAGraph) -> int:
    return sum(s.nbytes() for s in graph._tape._kept)  # type: ignore[attr-defined]


def _follows() -> None:
    """Captures the program and asserts that replays follow their input as eager does."""
    x = torch.randn(SIDE, SIDE, device="cuda")
    graph, out = _captured(_program, x)
    for seed in (1, 2, 1):
        x.copy_(torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, _program(x))


def test_replays_compute_what_eager_does() -> None:
    _follows()


def test_what_is_given_up_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Use.add

    def forgetful(use: Use, *args: object, **kwargs: object) -> None:
        last, fresh = use.last, not use.refs
        add(use, *args, **kwargs)  # type: ignore[arg-type]
        use.last = use.last if fresh else last

    monkeypatch.setattr(Use, "add", forgetful)
    with pytest.raises((RuntimeError, IndexError, AssertionError)):
        _follows()


def test_only_the_result_is_kept_and_all_is_accounted_for() -> None:
    x = torch.randn(SIDE, SIDE, device="cuda")
    before = torch.cuda.memory_allocated()
    graph, out = _captured(lambda x: ((x + 1) * 2 - x) / 3, x)
    assert _kept(graph) == out.nbytes
    assert graph.owned_bytes == 4 * out.nbytes  # type: ignore[attr-defined]
    assert torch.cuda.memory_allocated() - before == 4 * out.nbytes


def test_what_somebody_holds_is_kept_and_follows() -> None:
    x, held = torch.zeros(SIDE, SIDE, device="cuda"), []

    def region(x: Tensor) -> Tensor:
        held.append(x + 1)
        return held[0] * 2

    graph, out = _captured(region, x)
    assert _kept(graph) == 2 * out.nbytes
    x.fill_(3)
    graph.replay()
    assert torch.equal(held[0], torch.full_like(x, 4))
    held[0].fill_(7)
    graph.replay()
    assert torch.equal(out, torch.full_like(x, 8))


def test_what_nobody_writes_stays_garbage() -> None:
    def region(x: Tensor) -> Tensor:
        half = torch.empty(2, SIDE, SIDE, device="cuda")
        half[0].copy_(x)
        return half + 0

    x = torch.ones(SIDE, SIDE, device="cuda")
    graph, out = _captured(region, x)
    for _ in range(2):
        graph.replay()
        assert torch.equal(out[0], x)
        assert out[1].view(torch.uint8).eq(0xFF).all()


def test_a_result_laid_out_in_another_way_is_copied() -> None:
    born = layout_of(torch.empty(3, 4))
    transient = Transient(48, born)
    whole, turned = transient.adopt(born), transient.adopt(layout_of(torch.empty(3, 4).t()))
    out = torch.arange(12.0).view(4, 3).t()
    transient.take(out)
    assert torch.equal(whole, out)
    assert torch.equal(turned, out.t())
    assert whole.data_ptr() != out.data_ptr()
    transient.drop()
    assert not whole.numel()
    assert not turned.numel()
