"""What only a device shows: overlap of graphs that share memory, and a capture beside a loader that pins memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from parity.runtime import GraphRunner
from parity.runtime.pool import Pool, _lasts
from parity.runtime.state import same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROUNDS = 100
SIZE = 1024
STEPS = 12


def long_kernels(seed: int) -> GraphRunner:
    weight = torch.randn(SIZE, SIZE, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) / SIZE**0.5

    def region(x: Tensor) -> Tensor:
        for _ in range(STEPS):
            x = torch.tanh(x @ weight)
        return x

    return GraphRunner(region)


def foreign() -> torch.cuda.ExternalStream:
    """A stream that torch takes for somebody else's."""
    return torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)


def wrong_rounds(stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream) -> int:
    """Rounds in which one of two graphs of one pool, replayed on two streams, did not return eager's bits."""
    pool = Pool()
    runners = [long_kernels(1), long_kernels(2)]
    for runner in runners:
        runner._new_pool = lambda: pool
    inputs = [torch.randn(SIZE, SIZE, device="cuda") for _ in runners]
    expected = [runner.region(x) for runner, x in zip(runners, inputs, strict=True)]
    for runner, x in zip(runners, inputs, strict=True):
        runner.capture(x)
    streams = [stream() for _ in runners]
    torch.cuda.synchronize()
    wrong = 0
    for _ in range(ROUNDS):
        found = []
        for runner, x, stream in zip(runners, inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(runner(x))
        torch.cuda.synchronize()
        wrong += not all(map(same_bits, found, expected))
    return wrong


@torch.no_grad()
@pytest.mark.parametrize("stream", [torch.cuda.Stream, foreign], ids=["torch's", "foreign"])
def test_two_graphs_of_one_pool_never_overlap(stream: Callable[[], torch.cuda.Stream]) -> None:
    assert wrong_rounds(stream) == 0


def test_only_streams_of_torch_are_known_to_last() -> None:
    assert _lasts(torch.cuda.default_stream())
    assert _lasts(torch.cuda.Stream())
    assert _lasts(torch.cuda.Stream(priority=-1))
    with torch.cuda.stream(foreign()):
        assert not _lasts(torch.cuda.current_stream())


def test_a_pool_tells_streams_by_their_address() -> None:
    pool = Pool()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), foreign()):
        with torch.cuda.stream(stream):
            assert pool.current(pool.device) == stream.cuda_stream


@torch.no_grad()
def test_without_the_wait_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    assert wrong_rounds() > 0


@torch.no_grad()
def test_a_capture_beside_a_loader_that_pins_memory() -> None:
    data = TensorDataset(torch.randn(64, 3, 64, 64))
    model = torch.nn.Conv2d(3, 8, 3, padding=1).to("cuda")
    runner = GraphRunner(model, max_graphs=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # workers fork from a process with threads
        for i, (x,) in enumerate(DataLoader(data, batch_size=2, num_workers=2, pin_memory=True)):
            x = x.to("cuda", non_blocking=True)[..., : 32 + i]  # every batch is captured anew while the next ones are pinned
            assert same_bits(runner(x), model(x))
    assert runner.info().captures == 32
