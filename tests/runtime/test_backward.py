"""Collections around a capture: one of the whole heap, and none that undoes what others froze."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from parity.runtime import TrainGraphs, backward
from parity.runtime.emulated import device


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    gc.unfreeze()  # a heap that an earlier test froze is none that a collection goes through
    with device():
        torch.manual_seed(0)
        yield


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Per collection, how many objects are not frozen: those that it goes through."""
    found: list[int] = []
    collect = gc.collect

    def counted(*args: Any) -> int:
        found.append(len(gc.get_objects()))
        return collect(*args)

    monkeypatch.setattr(gc, "collect", counted)
    return found


def captured() -> TrainGraphs:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to("cuda")
    graphs = TrainGraphs(net, threshold=1)
    for _ in range(3):
        graphs(torch.randn(2, 3, device="cuda")).sum().backward()
    assert graphs.captures == 1, graphs.reason
    return graphs


def test_one_collection_of_a_capture_goes_through_the_heap(looked_at: list[int]) -> None:
    before = gc.get_freeze_count()
    heap = len(gc.get_objects())
    captured()
    assert sum(count > heap // 4 for count in looked_at) == 1
    assert gc.get_freeze_count() == before


def test_without_freezing_several_would(looked_at: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)
    heap = len(gc.get_objects())
    captured()
    assert sum(count > heap // 4 for count in looked_at) > 1


def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        captured()
        assert gc.get_freeze_count() >= before - 1000  # frozen objects may still die by their count
    finally:
        gc.unfreeze()


def test_a_failing_block_thaws() -> None:
    before = gc.get_freeze_count()

    def fails() -> None:
        with backward._frozen():
            assert gc.get_freeze_count() > before
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        fails()
    assert gc.get_freeze_count() == before
