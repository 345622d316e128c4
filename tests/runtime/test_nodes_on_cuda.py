"""Copies as nodes of a graph, on CUDA: every bit of eager, with calls queued and results held, whatever the memory and the stream."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.runtime import GraphRunner, nodes
from parity.runtime.invalidation import scope
from parity.runtime.record import Entry
from parity.runtime.state import same_bits
from parity.runtime.steady import MISS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CALLS = 60


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    if nodes.available() is None:
        pytest.skip("this torch does not give away its graphs")
    with torch.no_grad():
        yield
    torch.cuda.synchronize()


def several(x: Tensor) -> tuple[Any, ...]:
    y = x
    for _ in range(8):
        y = y * 1.01 + 0.1
    wide = torch.nn.functional.pad(y, (0, 4))
    return (
        y,
        wide[..., :-1],
        y.half(),
        y > 0,
        y[:0],
        y.to(memory_format=torch.channels_last),
        y.mean(),
        y.permute(3, 0, 2, 1).contiguous(),
        5,
    )


def alone(x: Tensor) -> Tensor:
    return several(x)[0] * 3  # type: ignore[no-any-return]


def dense(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(t for t in several(x) if isinstance(t, Tensor) and t.shape[-1:] != (11,))


REGIONS = {"several": several, "alone": alone, "dense": dense}


def drawn(seed: int) -> Tensor:
    return torch.randn(2, 3, 9, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def equal(found: Any, expected: Any) -> bool:
    found, expected = ((r if isinstance(r, tuple) else (r,)) for r in (found, expected))
    return all(same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(found, expected, strict=True))


def only(runner: GraphRunner) -> Entry:
    (entry,) = runner.entries()
    return entry


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("queued", [True, False])
def test_held_results_are_eagers(region: str, queued: bool) -> None:
    runner = GraphRunner(REGIONS[region])
    runner.capture(drawn(0))
    copies = only(runner).copies
    assert copies is not None
    assert copies.takes
    assert copies.gives
    if queued:
        torch.cuda._sleep(50_000_000)
    held = []
    for seed in range(CALLS):
        x = drawn(seed)
        held.append(runner(x))
        x.fill_(float("nan"))  # behind the call on the same stream
        del x
        if not queued:
            torch.cuda.synchronize()
    assert all(equal(result, REGIONS[region](drawn(seed))) for seed, result in enumerate(held))
    tensors = [t for r in held for t in (r if isinstance(r, tuple) else (r,)) if isinstance(t, Tensor) and t.numel()]
    places = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(places)) == len(places)
    assert only(runner).copies is copies
    assert runner.info().replays == CALLS


def test_where_no_address_is_told_results_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: it is the nodes that copy."""
    runner = GraphRunner(alone)
    runner.capture(drawn(0))
    runner(drawn(0))
    copies: Any = only(runner).copies
    monkeypatch.setattr(copies, "aim", lambda addresses: copies._next)
    kept = drawn(1)  # of another address than the first
    held = [runner(kept) for _ in range(3)]
    torch.cuda.synchronize()
    assert not all(equal(r, alone(kept)) for r in held)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x[..., ::2],
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x.flatten()[1:],
        lambda x: x[:0],
        lambda x: x.half(),
        lambda x: x.bfloat16(),
        lambda x: x > 0,
        lambda x: (x * 100).long(),
        lambda x: torch.complex(x, -x),
    ],
)
def test_inputs_of_any_geometry_and_type(change: Callable[[Tensor], Tensor]) -> None:
    runner = GraphRunner(lambda x: (x * 2, x.flatten(), torch.ones(3, device="cuda")))
    for seed in range(5):
        x = change(drawn(seed))
        assert equal(runner(x), runner.region(x))
    assert runner.info().captures == 1


def test_two_inputs_one_twice_and_one_passed_on() -> None:
    runner = GraphRunner(lambda a, b, c: (a, a + b * c, c))
    for seed in range(4):
        x, y = drawn(seed), drawn(seed + 1)
        result = runner(x, x, y)
        assert result[0] is x
        assert result[2] is y
        assert same_bits(result[1], x + x * y)


def test_a_result_fed_back() -> None:
    """What is read is what was written by the call before, also where results are the graph's own."""
    for clone in (True, False):
        runner = GraphRunner(lambda x: x * 1.5 + 1, clone_outputs=clone)
        x = eager = drawn(3)
        for _ in range(10):
            x, eager = runner(x), eager * 1.5 + 1
        assert same_bits(x, eager)


def test_a_result_that_its_owner_moves_is_followed() -> None:
    table = torch.arange(4.0, device="cuda")
    runner = GraphRunner(lambda x: (x + 1, table))
    x = drawn(0)
    runner(x)
    assert not only(runner).copies.gives  # type: ignore[union-attr]
    with torch.no_grad():
        table.data = table * 2
    assert same_bits(runner(x)[1], table)


def test_random_numbers_are_eagers() -> None:
    runner = GraphRunner(lambda x: nn.functional.dropout(x, 0.5, True))
    x = drawn(0)
    runner.capture(x)
    torch.manual_seed(7)
    expected = [runner.region(x) for _ in range(5)]
    torch.manual_seed(7)
    assert all(equal(runner(x), e) for e in expected)
    assert not only(runner).copies.numbered  # type: ignore[union-attr]


def test_results_that_are_held_in_turns_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executable graphs know a place each, also while both are queued."""
    runner = GraphRunner(dense)
    inputs = [drawn(seed) for seed in range(20)]
    expected = [dense(x) for x in inputs]
    kept = [tuple(torch.empty_like(t) for t in result) for result in expected]
    x = inputs[0].clone()
    held = runner(x)
    for _ in range(4):
        held = runner(x)
    copies: Any = only(runner).copies
    assert copies.numbered
    assert len(copies._told) > 1
    monkeypatch.setattr(copies, "aim", lambda addresses: pytest.fail("an address was told"))
    torch.cuda._sleep(20_000_000)
    for given, copy in zip(inputs, kept, strict=True):
        x.copy_(given)
        held = runner(x)
        for target, source in zip(copy, held, strict=True):
            target.copy_(source)
    assert all(map(equal, kept, expected))


def test_streams_follow_each_other() -> None:
    runner = GraphRunner(dense)
    runner.capture(drawn(0))
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [drawn(seed) for seed in range(30)]
    torch.cuda.synchronize()
    held = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            held.append(runner(x))
    torch.cuda.synchronize()
    assert all(equal(r, dense(x)) for r, x in zip(held, inputs, strict=True))


def test_beside_the_graph_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nodes = GraphRunner(dense)
    monkeypatch.setattr(nodes, "available", lambda: None)
    without = GraphRunner(dense)
    without.capture(drawn(0))
    monkeypatch.undo()
    for seed in range(5):
        assert equal(with_nodes(drawn(seed)), without(drawn(seed)))
    assert only(without).copies is None
    assert only(with_nodes).copies is not None


@pytest.mark.parametrize("queued", [True, False])
def test_memory_that_cuda_does_not_take_goes_beside_the_graph_for_good(queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GraphRunner(dense)
    held = [runner(drawn(seed)) for seed in range(3)]
    copies: Any = only(runner).copies
    if queued:
        torch.cuda._sleep(50_000_000)
        held.append(runner(drawn(3)))
    monkeypatch.setattr(copies, "_ends", [(node, own, 0) for node, own, _ in copies._ends])  # CUDA refuses no bytes
    copies.known.clear()
    held += [runner(drawn(seed)) for seed in range(len(held), 8)]
    assert only(runner).copies is None
    assert all(equal(r, dense(drawn(seed))) for seed, r in enumerate(held))
    assert float(torch.ones(3, device="cuda").sum()) == 3.0  # the error is forgotten


def test_a_graph_that_takes_no_nodes_is_replayed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    real = nodes._bytes
    monkeypatch.setattr(nodes, "_bytes", lambda t: real(t) * 2**20)  # more than there is
    runner = GraphRunner(alone)
    runner.capture(drawn(0))
    monkeypatch.undo()
    if only(runner).copies is not None:
        pytest.skip("CUDA does not look at how much is copied")
    assert equal(runner(drawn(1)), alone(drawn(1)))


def test_a_caller_that_captures_gets_eager() -> None:
    runner = GraphRunner(alone)
    x = drawn(0)
    runner(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = runner(x)
    x.copy_(drawn(5))
    graph.replay()
    assert equal(result, alone(x))
    assert runner.info().eager == {"the current stream is being captured by somebody else": 1}


def test_released_graphs_leave_results_alone() -> None:
    runner = GraphRunner(dense)
    held = [runner(drawn(seed)) for seed in range(4)]
    runner.release()
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((2, 3, 9, 8), float("nan"), device="cuda") for _ in range(50)]
    assert all(equal(r, dense(drawn(seed))) for seed, r in enumerate(held))
    del junk


def test_a_first_use_that_validates_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GraphRunner(dense, gap=lambda inputs: "no certificate covers this")
    assert equal(runner(drawn(0)), dense(drawn(0)))
    assert runner.info().captures == 1


def test_the_shortcut_is_taken_and_tells_calls_apart() -> None:
    runner = GraphRunner(alone)
    shapes = [drawn(0), drawn(1)[:1], drawn(2).half()]
    with scope():
        for x in shapes * 3:
            for _ in range(3):
                assert equal(runner(x), alone(x))
            shortcut, _ = runner._shortcut
            result = shortcut(x)
            assert result is not MISS
            assert equal(result, alone(x))
            assert shortcut(x[..., :1]) is MISS
    assert runner.info().captures == 3
    shortcut, epoch = runner._shortcut
    runner.release()
    assert epoch != runner._epoch
    assert runner._shortcut[0] is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_current_device_does_not_matter() -> None:
    runner = GraphRunner(dense)
    held = []
    for seed in range(6):
        x = drawn(seed)
        with torch.cuda.device(seed % 2):
            held.append(runner(x))
        assert all(t.device == x.device for t in held[-1])
    assert all(equal(r, dense(drawn(seed))) for seed, r in enumerate(held))
    assert only(runner).copies is not None


ELSEWHERE = """
import torch
from parity.runtime import GraphRunner
from parity.runtime.state import same_bits
with torch.no_grad():
    runner = GraphRunner(lambda x: (x * 2, x + 1, x.sum()))
    held = []
    for i in range(40):
        x = torch.full((1 << (10 + i % 3),), float(i), device="cuda")
        held.append((x, runner(x)))
        if i % 10 == 9:
            torch.cuda.empty_cache()
    assert all(same_bits(a, b) for x, r in held for a, b in zip(r, (x * 2, x + 1, x.sum())))
    print(*[entry.copies is not None for entry in runner.entries()])
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:20"])
def test_other_allocators(setting: str) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    print(setting, done.stdout)


GIVEN_BACK = """
import torch
from parity.runtime import GraphRunner
from parity.runtime.state import same_bits
with torch.no_grad():
    runner = GraphRunner(lambda x: (x * 2, x + 1))
    x = torch.ones(1 << 24, device="cuda")
    runner(x)
    del x
    torch.cuda.empty_cache()
    x = torch.full((1 << 24,), 3.0, device="cuda")
    for i in range(8):  # unmapped, and mapped again where some graph was told
        result = runner(x.fill_(i))
        assert all(same_bits(a, b) for a, b in zip(result, (x * 2, x + 1)))
        del result
        torch.cuda.empty_cache()
    held = []
    for i in range(8):
        x = torch.full((1 << 24,), float(i), device="cuda")
        held.append((x, runner(x)))
        torch.cuda.empty_cache()
    assert all(same_bits(a, b) for x, r in held for a, b in zip(r, (x * 2, x + 1)))
    print(len(runner.entries()[0].copies._told))
"""


@pytest.mark.parametrize("setting", ["", "expandable_segments:True"])
def test_memory_of_the_capture_may_be_given_back(setting: str) -> None:
    """Another executable graph is made then; with addresses that are nobody's it would end the process."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 1


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_an_executable_graph_may_end_while_somebody_captures(mode: str) -> None:
    """A collection of garbage does not ask what is captured."""
    runner = GraphRunner(dense)
    held = [runner(drawn(seed)) for seed in range(4)]
    copies: Any = only(runner).copies
    assert copies._ending
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x + 1
        for end in copies._ending:
            end()
        y = y * 2
    graph.replay()
    assert same_bits(y, torch.full((8,), 4.0, device="cuda"))
    assert all(equal(r, dense(drawn(seed))) for seed, r in enumerate(held))
    del runner, copies
