"""Graphs of one pool follow each other: on the host by a lock, on the device by the order of a stream or by an event between two."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from parity.runtime import GraphRunner
from parity.runtime import pool as pools
from parity.runtime.emulated import device
from parity.runtime.pool import Pool, StreamCaptured


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with device(), torch.no_grad():
        yield


def two_on_one_pool() -> tuple[GraphRunner, GraphRunner]:
    pool = Pool()
    return GraphRunner(lambda x: x * 2, pool=lambda: pool), GraphRunner(lambda x: x * 3, pool=lambda: pool)


def replayed_on_two_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    first, second = two_on_one_pool()
    x = torch.ones(3, device="cuda")
    first.capture(x)
    second.capture(x)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        first(x)
    with torch.cuda.stream(other):
        second(x)
    return one, other


def test_a_replay_waits_for_the_last_one_on_another_stream() -> None:
    one, other = replayed_on_two_streams()
    assert one in other.seen  # type: ignore[attr-defined]
    assert other not in one.seen  # type: ignore[attr-defined]


def test_without_the_wait_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    one, other = replayed_on_two_streams()
    assert one not in other.seen  # type: ignore[attr-defined]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is recorded and waited for from here on."""
    told: list[str] = []
    record, wait = torch.cuda.Event.record, torch.cuda.Stream.wait_event
    monkeypatch.setattr(torch.cuda.Event, "record", lambda self, stream=None: (told.append("record"), record(self, stream))[1])
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: (told.append("wait"), wait(self, event))[1])
    return told


def test_on_one_stream_nobody_waits(events: list[str]) -> None:
    first, second = two_on_one_pool()
    x = torch.ones(3, device="cuda")
    for _ in range(3):
        first(x)
        second(x)
    assert events == []


def test_each_change_of_stream_is_waited_for_once(events: list[str]) -> None:
    first, second = two_on_one_pool()
    x = torch.ones(3, device="cuda")
    first(x)
    second(x)
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            first(x)
            second(x)
        first(x)
    assert events == ["record", "wait"] * 4


def test_behind_a_replay_on_a_foreign_stream_an_event_is_recorded_at_once(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """It may be destroyed before another comes, or be another under the same number: also the next replay on it waits."""
    first, second = two_on_one_pool()
    x = torch.ones(3, device="cuda")
    first(x)
    second(x)
    foreign = torch.cuda.Stream()
    monkeypatch.setattr(pools, "_lasts", lambda stream: stream is not foreign)
    with torch.cuda.stream(foreign):
        first(x)
        assert events == ["record", "wait", "record"]
        second(x)
        assert events[3:] == ["wait", "record"]
    monkeypatch.setattr(foreign, "record_event", lambda: pytest.fail("nothing may be asked of a stream that is gone"))
    first(x)
    assert events[5:] == ["wait"]


def replayed_beside_a_capture() -> GraphRunner:
    """On another stream than the one of the last replay, which is being captured by then."""
    runner, _ = two_on_one_pool()
    x = torch.ones(3, device="cuda")
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    runner.capture(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(one):
        runner(x)
        graph.capture_begin()
    try:
        with torch.cuda.stream(other):
            runner(x)
        assert one not in other.seen  # type: ignore[attr-defined]  # else it would have joined the capture
        with pytest.raises(StreamCaptured):
            runner.release()
        assert len(runner.entries()) == 1
    finally:
        with torch.cuda.stream(one):
            graph.capture_end()
    with torch.cuda.stream(other):
        runner(x)
    assert one in other.seen  # type: ignore[attr-defined]
    return runner


def test_beside_a_capture_on_the_last_stream_a_call_runs_eagerly() -> None:
    info = replayed_beside_a_capture().info()
    assert info.replays == 2
    assert info.eager == {"the stream of the last replays is being captured by somebody else": 1}


def test_without_asking_whether_it_is_captured_it_would_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(RuntimeError, match="a replay inside a capture"):
        replayed_beside_a_capture()


def test_streams_of_torch_last_and_others_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Native:
        def __init__(self, number: int, address: int) -> None:
            self.stream_id, self.cuda_stream = number, address

    monkeypatch.setattr(torch._C, "_CudaStreamBase", Native)
    assert pools._lasts(Native(0, 0))  # the default stream
    assert pools._lasts(Native(3, 0x55D0C0DE))
    assert not pools._lasts(Native(0x55D0C0DE, 0x55D0C0DE))
    assert not pools._lasts(Native(2, 2))  # CUDA's per-thread default stream


def test_a_second_thread_waits_on_the_host() -> None:
    pool, order = Pool(), []
    pool.begin()

    def other() -> None:
        pool.begin()
        order.append("other")
        pool.end()

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.05)
    order.append("first")
    pool.end()
    thread.join()
    assert order == ["first", "other"]


def test_a_replay_that_raises_gives_the_pool_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = two_on_one_pool()
    x = torch.ones(3, device="cuda")
    runner(x)
    (entry,) = runner.entries()

    class Broken:
        def replay(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    whole, entry.graph = entry.graph, Broken()
    with pytest.raises(RuntimeError, match="device-side assert"):
        runner(x)
    entry.graph = whole
    free: list[bool] = []
    thread = threading.Thread(target=lambda: free.append(entry.pool.lock.acquire(timeout=1)))
    thread.start()
    thread.join()
    assert free == [True]


def test_release_waits_for_what_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    runner, _ = two_on_one_pool()
    x: Tensor = torch.ones(3, device="cuda")
    runner(x)
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: waited.append(self))
    runner.release()
    assert len(waited) == 1
    runner.release()
    assert len(waited) == 1


def test_who_settles_within_a_replay_is_still_waited_for(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Unlike ``drain``, which forgets the streams, it leaves ``end`` and the next ``begin`` what they need."""
    runner, _ = two_on_one_pool()
    x = torch.ones(3, device="cuda")
    runner(x)
    (entry,) = runner.entries()
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: waited.append(self))
    entry.pool.begin()
    entry.pool.settle()
    entry.pool.end()
    assert len(waited) == 1
    del events[:]
    with torch.cuda.stream(torch.cuda.Stream()):
        runner(x)
    assert events == ["record", "wait"]
