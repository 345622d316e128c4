"""The two engines behind one interface."""

from __future__ import annotations

import pytest
import torch

from parity.judge.bits import same
from parity.runtime.engine import DEVICE, Engine, engine, on_device


@pytest.fixture
def emulated() -> Engine:
    return engine("emulated")


def test_engines_by_name() -> None:
    assert (engine("cuda").name, engine("cuda").certifies) == ("cuda", True)
    assert (engine("emulated").name, engine("emulated").certifies) == ("emulated", False)
    with pytest.raises(ValueError, match="no engine is called 'tpu': cuda, emulated"):
        engine("tpu")


def test_what_is_on_the_device(emulated: Engine) -> None:
    assert not on_device(torch.zeros(1))
    assert not on_device(torch.zeros(2, 2).to_sparse())
    assert not on_device(torch.zeros(1, device="meta"))
    with emulated.entered():
        there = torch.zeros(2, device=DEVICE)
        assert on_device(there)
        assert on_device(there[1:])
        assert not on_device(there.cpu())
        with emulated.quiet():
            assert on_device(there)  # also where nothing makes it say so


def test_nothing_of_the_judges_is_seen_in_quiet(emulated: Engine) -> None:
    with emulated.entered():
        x = torch.arange(3.0, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            with emulated.quiet():
                assert x.sum().item() == 3.0  # a host sync, which the capture would refuse
                x.clone()
        with emulated.quiet():
            x.add_(1)
        graph.replay()
        with emulated.quiet():
            assert same(y.clone(), torch.tensor([2.0, 4.0, 6.0]))


def test_which_tensors_a_capture_allocated(emulated: Engine) -> None:
    with emulated.entered():
        x = torch.zeros(3, device=DEVICE)
        graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
        with torch.cuda.graph(other):
            z = x + 2
        everything = [x, y, y[1:], z, torch.zeros(3)]
        assert [t is everything[i] for t, i in zip(emulated.allocated_by([graph], everything), (1, 2), strict=True)] == [True, True]
        assert emulated.allocated_by([], everything) == []
        assert len(emulated.allocated_by([graph, other], everything)) == 3


def test_a_dead_read_is_told_by_the_engine(emulated: Engine) -> None:
    with emulated.entered():
        x, table = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * table
        graph.replay()
        assert emulated.stale([graph]) == []
        del table
        graph.replay()
        assert len(emulated.stale([graph])) == 1
        with emulated.quiet():
            assert not same(y.clone(), torch.ones(3))


def test_leaving_restores_torch_even_after_an_error(emulated: Engine) -> None:
    before = (torch.cuda.CUDAGraph, torch.cuda.is_available, torch.zeros)
    with emulated.entered():
        assert torch.cuda.is_available()
    with pytest.raises(ZeroDivisionError), emulated.entered():
        raise ZeroDivisionError
    assert (torch.cuda.CUDAGraph, torch.cuda.is_available, torch.zeros) == before
    assert not on_device(torch.zeros(1))
