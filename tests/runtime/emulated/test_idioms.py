"""Legality of single idioms against an H200's, their causes, and that a replay of the legal ones equals eager bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parity.runtime.emulated import device, is_marked
from parity.runtime.errors import CaptureRefused

from .idioms import COPIES_NUMBERS, IDIOMS, MIXED, Idiom, Kit, make_kit

_DATA = Path(__file__).parents[2] / "data" / "idioms_h200.jsonl"
TRUTH = {record["idiom"]: record for record in map(json.loads, _DATA.read_text().splitlines())}
NO_EAGER = {"numpy", "np_asarray"}  # a TypeError in eager too: a device tensor is no array


def bits(value: Any) -> list[tuple[Any, ...]]:
    leaves = (t.detach() for t in tree_leaves(value) if isinstance(t, Tensor))
    return [
        (t.dtype, tuple(t.shape), t.is_cuda, t.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()) for t in leaves if t.numel()
    ]


@pytest.fixture
def kit() -> Iterator[Kit]:
    torch.manual_seed(0)
    with device(), torch.no_grad():
        yield make_kit()


def capture(idiom: Idiom, x: Tensor, kit: Kit) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = idiom.run(x, kit)
    return graph, out


def test_every_idiom_has_its_truth() -> None:
    assert set(IDIOMS) == set(TRUTH)
    assert len(IDIOMS) == 79


@pytest.mark.parametrize("name", sorted(IDIOMS))
def test_legality_is_the_h200s(name: str) -> None:
    legal = TRUTH[name]["capture"] == "ok"
    if name == "equal":  # recorded as torch.equal(x, x), see its docstring
        assert legal
        legal = False
    if name == "set_elem":  # recorded where a number is copied
        assert not legal
        legal = not COPIES_NUMBERS
    assert (IDIOMS[name].cause is None) == legal


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("name", [n for n, i in IDIOMS.items() if i.cause not in {None, MIXED}])
def test_refused_with_its_cause_and_line(name: str, inference_mode: bool, kit: Kit) -> None:
    x = torch.randn(4, 3, device="cuda")
    with torch.inference_mode(inference_mode):
        if name not in NO_EAGER:
            IDIOMS[name].run(x, kit)
        before = torch.cuda.get_rng_state().tolist()
        with pytest.raises(CaptureRefused) as refused:
            capture(IDIOMS[name], x, kit)
    assert refused.value.cause == IDIOMS[name].cause
    assert "tests/runtime/emulated/idioms.py:" in refused.value.where
    assert torch.cuda.get_rng_state().tolist() == before
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    graph, out = capture(IDIOMS["scalar"], x, kit)
    graph.replay()
    assert bits(out) == bits(x * 2 + 1)


@pytest.mark.parametrize("name", [n for n, i in IDIOMS.items() if i.cause == MIXED])
def test_mixed_devices_fail_in_eager_and_in_capture(name: str, kit: Kit) -> None:
    x = torch.randn(4, 3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        IDIOMS[name].run(x, kit)
    with pytest.raises(RuntimeError, match="same device"):
        capture(IDIOMS[name], x, kit)


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("name", [n for n, i in IDIOMS.items() if i.cause is None])
def test_replay_equals_eager(name: str, inference_mode: bool, kit: Kit) -> None:
    with torch.inference_mode(inference_mode):
        probes = torch.randn(4, 3, device="cuda"), torch.randn(4, 3, device="cuda") * 2
        IDIOMS[name].run(probes[0], kit)
        torch.manual_seed(3)
        eager = [bits(IDIOMS[name].run(x, kit)) for x in probes]
        state = torch.cuda.get_rng_state().tolist()
        torch.manual_seed(3)
        static = probes[0].clone()
        graph, out = capture(IDIOMS[name], static, kit)
        replayed = []
        for x in probes:
            static.copy_(x)
            graph.replay()
            replayed.append(bits(out))
        assert replayed == eager
        assert eager[0]
        assert torch.cuda.get_rng_state().tolist() == state
        assert graph.stale == []
        assert all(is_marked(t) for t in tree_leaves(out) if isinstance(t, Tensor))


def test_equal_of_one_tensor_with_itself_is_legal(kit: Kit) -> None:
    """As recorded on the H200: CUDA does not look at the values of one and the same view."""
    x = torch.randn(4, 3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.equal(x, x)
        assert not torch.equal(x, x[:2])
    with pytest.raises(CaptureRefused, match="host-sync"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.equal(x, x.t().t().clone())
