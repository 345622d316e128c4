"""Captures and replays: what a graph keeps, forgets, refuses and leaves behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parity.runtime.emulated import device
from parity.runtime.errors import CaptureRefused, StaleGraph


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with device():
        torch.manual_seed(0)
        yield


def bits(*tensors: Tensor) -> list[list[int]]:
    return [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist() for t in tensors]


# ---------------------------------------------------------------- replay
def test_replay_follows_its_static_input() -> None:
    static = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream(), capture_error_mode="relaxed"):
        assert torch.cuda.is_current_stream_capturing()
        out = static * 2
    for value in (1.0, 2.0, 1.0):
        static.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value] * 3
    assert graph.operations == 1
    assert graph.owned_bytes == 12
    assert graph.pool() is not None


def test_begin_and_end_by_hand_share_a_pool() -> None:
    static, stream = torch.ones(2, device="cuda"), torch.cuda.Stream()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        first.capture_begin()
        a = static + 1
        first.capture_end()
        second.capture_begin(pool=first.pool())
        b = a * 3
        second.capture_end()
    second.instantiate()
    assert first.pool() == second.pool()
    first.replay()
    second.replay()
    assert b.tolist() == [6, 6]
    assert first.owns(a)
    assert not second.owns(a)
    assert second.owns(b[:1])
    assert not first.owns(static)
    assert not first.owns(torch.ones(2))


def test_a_capture_leaves_garbage_until_the_first_replay() -> None:
    static = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, whole = static * 2, (static * 2).long()
    assert out.isnan().all()
    assert whole.tolist() == [-1, -1]
    graph.replay()
    assert out.tolist() == [2, 2]
    graph.poison(0x3F)
    assert bits(out) == [[0x3F] * 8]
    graph.replay()
    assert whole.tolist() == [2, 2]


@pytest.mark.parametrize(
    "read", [lambda t: t.tolist(), lambda t: repr(t), lambda t: t.cpu(), lambda t: t.clone(), lambda t: t[0].item()]
)
def test_whoever_looks_sees_garbage(read: Any) -> None:
    static = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * 2
    read(out)
    with device():
        assert out.isnan().all()


def test_what_nobody_writes_stays_garbage() -> None:
    static = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.empty(2, device="cuda")
        out[:1].copy_(static[:1])
    graph.replay()
    assert out[0] == 1
    assert out[1].isnan()


def test_a_capture_writes_nothing_outside() -> None:
    state, host = torch.zeros(2, device="cuda"), torch.zeros(2).pin_memory()
    norm = nn.BatchNorm1d(2).cuda()
    x = torch.randn(4, 2, device="cuda")
    before = bits(*norm.buffers())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        norm(x)
        state.add_(1)
        host.copy_(state, non_blocking=True)
    assert bits(*norm.buffers()) == before
    assert state.tolist() == [0, 0]
    assert host.tolist() == [0, 0]
    graph.replay()
    graph.replay()
    assert state.tolist() == [2, 2]
    assert host.tolist() == [2, 2]
    assert int(norm.num_batches_tracked) == 2
    assert bits(*norm.buffers()) != before


def test_numbers_of_the_host_are_frozen_and_pinned_memory_is_read() -> None:
    number, pinned, static = torch.tensor(2.0), torch.ones(2).pin_memory(), torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a, b = static * number, pinned.to("cuda", non_blocking=True) + 0
    number.fill_(100)
    pinned.fill_(7)
    graph.replay()
    assert a.tolist() == [2, 2]
    assert b.tolist() == [7, 7]


def test_random_numbers_advance_per_replay_not_per_capture() -> None:
    def draw() -> Tensor:
        return torch.rand(3, device="cuda") + torch.randn(3, device="cuda")

    torch.manual_seed(9)
    eager = [draw().tolist() for _ in range(3)]
    torch.manual_seed(9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draw()
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append(out.tolist())
    assert replayed == eager


def test_a_generator_must_be_registered() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    with pytest.raises(RuntimeError, match="register_generator_state"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.rand(2, device="cuda", generator=generator)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out = torch.rand(2, device="cuda", generator=generator)
    graph.replay()
    first = out.tolist()
    graph.replay()
    assert out.tolist() != first
    assert torch.rand(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).tolist() == first


def _seed() -> None:
    torch.manual_seed(1)


def _state_of_another_seed() -> None:
    torch.cuda.set_rng_state(torch.Generator("cuda").clone_state().get_state() + 1)


@pytest.mark.parametrize(
    "seeds", [_seed, _state_of_another_seed, torch.cuda.seed, lambda: torch.cuda.default_generators[0].get_offset()]
)
def test_another_seed_is_refused_in_a_capture(seeds: Any) -> None:
    with pytest.raises(CaptureRefused, match="not permitted") as refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        seeds()
    assert refused.value.cause == "rng"


def test_the_seed_that_is_there_changes_nothing_in_a_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.manual_seed(0)
        out = torch.rand(2, device="cuda")
    graph.replay()
    first = out.tolist()
    graph.replay()
    assert out.tolist() != first, "a replay draws on: the seed of the capture is not set again"


# ---------------------------------------------------------------- addresses
def test_a_dead_read_is_poison_and_is_named() -> None:
    static, table = torch.ones(2, device="cuda"), torch.ones(5, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static + table[3]
    graph.replay()
    assert out.tolist() == [2, 2]
    assert graph.stale == []
    del table
    graph.replay()
    assert out.isnan().all()
    assert [str(s) for s in graph.stale] == ["float32[2]"]
    graph.replay()
    assert len(graph.stale) == 1
    static.fill_(3)


def test_storage_that_moved_is_as_dead() -> None:
    weight, static = torch.ones(2, device="cuda"), torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * weight
    weight.untyped_storage().resize_(1 << 20)
    graph.replay()
    assert len(graph.stale) == 1
    assert out.isnan().all()


def test_a_replaced_parameter_is_stale_and_one_changed_in_place_is_not() -> None:
    layer, static = nn.Linear(2, 2, bias=False).cuda(), torch.ones(1, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = layer(static)
    with torch.no_grad():
        layer.weight.mul_(3)
        graph.replay()
        assert bits(out) == bits(layer(static))
        layer.weight.data = layer.weight.data.clone()
    graph.replay()
    assert [str(s) for s in graph.stale] == ["float32[2, 2]"]


def test_garbage_used_as_an_index_names_the_dead_reads() -> None:
    table, index = torch.ones(5, 2, device="cuda"), torch.tensor([1, 2], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        F.embedding(index, table)
    del index
    with pytest.raises(StaleGraph, match=r"int64\[2\].*capture again"):
        graph.replay()


def test_liveness_can_be_checked_before_a_replay() -> None:
    static = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(check_input_liveness=True)
        _ = static + 1
        graph.capture_end()
    graph.replay()
    del static
    with pytest.raises(StaleGraph, match="freed"):
        graph.replay()


# ---------------------------------------------------------------- training
def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(), nn.Linear(36, 3)
    ).cuda()


def _step(net: Any, x: Tensor) -> list[list[int]]:
    for p in net.parameters():
        p.grad = None
    loss = net(x).square().mean()
    loss.backward()
    return bits(loss, *(p.grad for p in net.parameters()), *net.buffers())


def test_make_graphed_callables_equals_eager_bit_for_bit() -> None:
    """Max-pooling's backward indexes with integers that the forward computed: a backward captured on garbage would fail."""
    xs = [torch.randn(2, 2, 8, 8, device="cuda") for _ in range(3)]
    eager_net = _net()
    torch.manual_seed(2)
    eager = [_step(eager_net, x) for x in xs]
    net = _net()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    torch.cuda.make_graphed_callables(net, (xs[0].clone(),))
    with torch.no_grad():
        for k, v in net.state_dict().items():
            v.copy_(state[k])
    torch.manual_seed(2)
    assert [_step(net, x) for x in xs] == eager


def test_recurrent_backward_finds_its_workspace() -> None:
    x = torch.randn(4, 2, 3, device="cuda", requires_grad=True)
    lstm = nn.LSTM(3, 3).cuda()
    (expected,) = torch.autograd.grad(lstm(x)[0].sum(), x)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        out = lstm(x)[0].sum()
    with torch.cuda.graph(backward):
        (grad,) = torch.autograd.grad(out, x)
    forward.replay()
    backward.replay()
    assert bits(grad) == bits(expected)


def test_a_whole_training_step() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(4)
        net = nn.Linear(4, 4).cuda()
        return net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=True, capturable=True)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        F.dropout(net(x)).square().sum().backward()
        optimizer.step()

    xs = [torch.randn(3, 4, device="cuda") for _ in range(4)]
    net, optimizer = build()
    torch.manual_seed(6)
    for x in xs:
        step(net, optimizer, x)
    graphed, optimizer = build()
    static = xs[0].clone()
    torch.manual_seed(6)
    step(graphed, optimizer, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(graphed, optimizer, static)
    for x in xs[1:]:
        static.copy_(x)
        graph.replay()
    assert bits(*graphed.parameters()) == bits(*net.parameters())


def test_autocast_backward_between_device_types() -> None:
    """A cast's backward names the device that its input reported to C++: the host. It is no transfer."""
    net, x = nn.Linear(3, 3).cuda(), torch.randn(2, 3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            out = net(x).float().sum()
        (grad,) = torch.autograd.grad(out, net.weight)
    graph.replay()
    assert grad.is_cuda
    assert not grad.isnan().any()


# ---------------------------------------------------------------- refusals
def test_a_failed_capture_leaves_the_device_clean() -> None:
    static, state = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    before = torch.cuda.get_rng_state().tolist()
    graph = torch.cuda.CUDAGraph()
    leaked = []

    def capture() -> None:
        with torch.cuda.graph(graph):
            state.add_(1)
            leaked.append(torch.rand(2, device="cuda"))
            static.sum().item()

    with pytest.raises(CaptureRefused) as refused:
        capture()
    assert refused.value.cause == "host-sync"
    assert "test_graph.py" in refused.value.where
    assert "static.sum().item()" in refused.value.where
    assert state.tolist() == [0, 0]
    assert leaked[0].isnan().all()
    assert torch.cuda.get_rng_state().tolist() == before
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with torch.cuda.graph(graph):
        out = static + 1
    graph.replay()
    assert out.tolist() == [2, 2]


class _Syncing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * grads[0].sum().item()


def test_backward_is_judged_like_forward() -> None:
    x = torch.ones(2, device="cuda", requires_grad=True)
    out = _Syncing.apply(x)
    with pytest.raises(CaptureRefused) as refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.autograd.grad(out, x, torch.ones_like(x))
    assert refused.value.cause == "host-sync"
    assert refused.value.where.endswith("return grads[0] * grads[0].sum().item()")


def test_another_error_inside_a_capture_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(2 // 0, device="cuda")
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()


def test_a_swallowed_sync_is_raised_at_the_end() -> None:
    x = torch.ones(2, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            with contextlib.suppress(CaptureRefused):
                x.sum().item()
            x.add(1)

    with pytest.raises(CaptureRefused, match="host-sync"):
        capture()
    assert torch.cuda.current_stream() is torch.cuda.default_stream()


def test_a_swallowed_copy_is_forgiven_as_by_torch() -> None:
    x = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureRefused, match="h2d-copy"):
            torch.ones(2).cuda()
        out = x + 1
    graph.replay()
    assert out.tolist() == [2, 2]


def test_a_capture_inside_an_except_block() -> None:
    graph = torch.cuda.CUDAGraph()
    try:
        raise ValueError
    except ValueError:
        with torch.cuda.graph(graph):
            out = torch.ones(2, device="cuda") + 1
    graph.replay()
    assert out.tolist() == [2, 2]


def test_an_unjoined_side_stream_is_refused_where_it_worked() -> None:
    x, side = torch.ones(2, device="cuda"), torch.cuda.Stream()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.mul(2)

    with pytest.raises(CaptureRefused) as refused:
        capture()
    assert refused.value.cause == "side-stream"
    assert refused.value.where.endswith("x.mul(2)")
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x + 1
    graph.replay()
    assert out.tolist() == [2, 2]


def test_streams_join_through_events_and_through_each_other() -> None:
    x, a, b = torch.ones(2, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(a):
            y = x * 2
        b.wait_stream(a)
        with torch.cuda.stream(b):
            z = y + 1
        done = torch.cuda.Event()
        done.record(b)
        torch.cuda.current_stream().wait_event(done)
        out = z * 1
    graph.replay()
    assert out.tolist() == [3, 3]


def test_a_capture_does_not_wait_for_what_is_outside_of_it() -> None:
    before, other, late = torch.cuda.Event(), torch.cuda.Stream(), torch.cuda.Event()
    before.record()
    for wait in (
        lambda: torch.cuda.current_stream().wait_stream(other),
        lambda: torch.cuda.current_stream().wait_event(before),
        before.wait,
        lambda: torch.cuda.default_stream().wait_stream(torch.cuda.current_stream()),
    ):
        with pytest.raises(CaptureRefused, match="waits for work") as refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait()
        assert refused.value.cause == "side-stream"
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.current_stream().wait_event(late)  # never recorded
        torch.cuda.current_stream().wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(other)


def test_work_on_a_stream_outside_the_capture_runs_at_once_and_is_not_replayed() -> None:
    x, count, other = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    other.wait_stream(torch.cuda.current_stream())  # before the capture: does not count
    with torch.cuda.graph(graph):
        out = x + 1
        with torch.cuda.stream(other):
            assert not torch.cuda.is_current_stream_capturing()
            count.add_(1)
    assert count.tolist() == [1, 1]
    graph.replay()
    assert count.tolist() == [1, 1]
    assert out.tolist() == [2, 2]


def test_misuse() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="not being captured"):
        graph.capture_end()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="Unknown capture error mode"):
        graph.capture_begin(capture_error_mode="sloppy")
    with torch.cuda.graph(graph):
        out = torch.ones(2, device="cuda") + 1
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="one at a time"):
            torch.cuda.CUDAGraph().capture_begin()
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="same stream"):
            graph.capture_end()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="already owns"):
        graph.capture_begin()
    graph.replay()
    assert out.tolist() == [2, 2]
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()


def test_operations_known_for_a_wrong_stream_warn() -> None:
    torchvision_ops = pytest.importorskip("torchvision.ops")
    x, weight = torch.randn(1, 2, 5, 5, device="cuda"), torch.randn(2, 2, 3, 3, device="cuda")
    offset = torch.zeros(1, 18, 3, 3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        torchvision_ops.deform_conv2d(x, offset, weight)
    assert len(graph.warnings) == 1
    assert "torchvision::deform_conv2d" in graph.warnings[0]
    plain = torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain):
        F.conv2d(x, weight)
    assert plain.warnings == []


def test_a_graph_frees_what_it_owned() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1000, device="cuda").add(1)
    assert torch.cuda.memory_allocated() - before == 8000
    del graph
    gc.collect()
    assert torch.cuda.memory_allocated() == before
