"""Graphs of one pool follow each other: on the host by a lock, on the device by an event, whatever streams they are replayed on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from parity.runtime import GraphRunner
from parity.runtime.emulated import device
from parity.runtime.pool import Pool


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


def test_on_one_stream_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: waits.append(event))
    first, second = two_on_one_pool()
    x = torch.ones(3, device="cuda")
    for _ in range(3):
        first(x)
        second(x)
    assert waits == []


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
