"""Random streams: what was drawn is drawn again once they are put back, and nothing else moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from parity.runtime import rng
from parity.runtime.engine import engine


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    host, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with engine("emulated").entered():
        yield
    torch.set_rng_state(host)
    random.setstate(python)
    np.random.set_state(numpy)


STREAMS: dict[str, Callable[[], Any]] = {
    "host": lambda: torch.rand(3).tolist(),
    "device": lambda: torch.rand(3, device="cuda").tolist(),
    "python": random.random,
    "numpy": lambda: np.random.rand(3).tolist(),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_what_was_drawn_is_drawn_again(stream: str) -> None:
    saved = rng.save()
    drawn = STREAMS[stream]()
    assert STREAMS[stream]() != drawn  # the stream does move
    rng.restore(saved)
    assert STREAMS[stream]() == drawn


@pytest.mark.parametrize("stream", STREAMS)
def test_whether_a_device_stream_has_moved_is_known(stream: str) -> None:
    own = torch.Generator("cuda")
    saved = rng.save([own])
    assert not rng.drawn(saved)
    STREAMS[stream]()
    assert rng.drawn(saved) == (stream == "device")
    rng.restore(saved)
    torch.rand(3, device="cuda", generator=own)
    assert rng.drawn(saved)


@pytest.mark.parametrize("stream", STREAMS)
def test_saving_moves_nothing(stream: str) -> None:
    saved = rng.save()
    rng.save()
    drawn = STREAMS[stream]()
    rng.restore(saved)
    assert STREAMS[stream]() == drawn


def test_a_saved_state_does_not_follow_the_stream() -> None:
    saved = rng.save()
    first = [draw() for draw in STREAMS.values()]
    for _ in range(2):
        rng.restore(saved)
        assert [draw() for draw in STREAMS.values()] == first


def test_repair_after_a_failed_capture_lets_the_device_draw_again() -> None:
    saved = rng.save()
    drawn = torch.rand(3, device="cuda").tolist()
    rng.restore(saved)
    with pytest.raises(Exception, match="host"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.rand(3, device="cuda").sum().item()
    rng.repair(saved)
    assert torch.rand(3, device="cuda").tolist() == drawn


def test_numpy_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rng.sys.modules, "numpy")
    saved = rng.save()
    assert saved.numpy is None
    rng.restore(saved)
