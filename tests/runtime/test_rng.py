"""Random streams: what was drawn is drawn again once they are put back, and nothing else moves."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.runtime import rng
from parity.runtime.engine import engine
from parity.runtime.errors import CaptureRefused


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


def test_a_host_generator_of_somebodys_own_is_put_back() -> None:
    own = torch.Generator()
    saved = rng.save((), [own])
    drawn = torch.rand(3, generator=own).tolist()
    assert not rng.drawn(saved), "no graph draws from it"
    rng.restore(saved)
    assert torch.rand(3, generator=own).tolist() == drawn


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


class _Deep(torch.autograd.Function):
    """A backward within a backward and so on: from some depth on autograd takes another thread, as it does for a CUDA device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, last: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.last = depth, last
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if not ctx.depth:
            ctx.last()
        else:
            with torch.enable_grad():
                _backward(ctx.depth - 1, ctx.last)
        return grad, None, None


def _backward(depth: int, last: Callable[[], None]) -> None:
    _Deep.apply(torch.ones(1, requires_grad=True), depth, last).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("depth", [0, 100])
def test_a_reset_in_a_backward_is_seen_whatever_thread_runs_it(depth: int) -> None:
    threads = set()

    def last() -> None:
        threads.add(threading.get_ident())
        torch.cuda.manual_seed(5)

    with rng.resets() as found:
        torch.rand(1, device="cuda")
        _backward(depth, last)
    assert (threads == {threading.get_ident()}) == (depth == 0)
    with pytest.raises(CaptureRefused, match=r"torch\.cuda\.manual_seed sets"):
        rng.refuse(found)


def test_a_reset_by_another_thread_is_not_ours() -> None:
    with rng.resets() as found:
        torch.rand(1, device="cuda")
        other = threading.Thread(target=torch.cuda.manual_seed, args=(5,))
        other.start()
        other.join()
    assert found == []
    original = torch.cuda.manual_seed
    with pytest.raises(KeyError), rng.resets():
        raise KeyError
    assert torch.cuda.manual_seed is original


def test_all_states_at_once_are_a_reset() -> None:
    states = torch.cuda.get_rng_state_all()
    torch.rand(1, device="cuda")
    with rng.resets() as found:
        torch.cuda.set_rng_state_all(states)
    assert found == [("torch.cuda.set_rng_state_all", True)]


def test_resets_of_the_first_call_count_where_others_follow() -> None:
    once = [("torch.cuda.manual_seed", True)]
    rng.refuse(once, first=1)
    with pytest.raises(CaptureRefused):
        rng.refuse([*once, ("torch.cuda.manual_seed", False)], first=1)
    rng.refuse([("torch.cuda.set_rng_state", False)])
