"""TrainGraphs: every step of a graphed run has the bits of the same run without it, or says by name why not."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import json
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parity.runtime import TrainGraphs, backward, gradients, step, training
from parity.runtime.allowlist import FILE, SCHEMA, Certificate, Tried, checksum
from parity.runtime.buffers import Intake, Outlet
from parity.runtime.emulated import device
from parity.runtime.errors import StaleGraph
from parity.runtime.identity import Identity, here
from parity.runtime.state import same_bits

from .steps import Body, Log, Small, both, differing, fresh, images, objective, plainly, state, trajectory, update

CASES = sorted(p for p in (Path(__file__).parent.parent / "corpus" / "cases").glob("*.py") if 'MODE = "training"' in p.read_text())


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # each capture collects garbage several times, and all of pytest and torch is none
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with device():
        yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- the corpus
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_corpus(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    case = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    every = getattr(case, "ACCUMULATE", 1)

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        probes, logs = case.probes("cuda"), []
        for i in range(10):
            if i % every == 0:
                owner.zero_grad(set_to_none=True)
            loss = case.loss(net(*probes[i % 2]), *probes[i % 2])
            loss.backward()
            logs.append([("loss", loss.detach().clone()), *state(owner)])
        return logs

    different, graphs, lines = both(case.build, body)
    assert different == []
    if path.stem == "fused_main_grad_microbatch":
        assert "python-counter" in graphs.reason
        assert (graphs.captures, graphs.replays, len(lines)) == (0, 0, 1)
    else:
        assert (graphs.captures, graphs.replays, lines) == (1, 7, [])


# ---------------------------------------------------------------- autocast
class SharedHead(nn.Module):
    """One weight used at three levels: cast once, its gradients add up in half precision; cast each time, in single."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.relu(self.stem(x))
        found = []
        for _ in range(3):
            found.append(self.out(torch.relu(self.head(x))))
            x = F.avg_pool2d(x, 2)
        return tuple(found)


class Island(nn.Module):
    """A layer kept in single precision: its backward inside autocast would not be."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).mean((2, 3))
        with torch.autocast("cuda", enabled=False):
            return self.b(x.float())


def mixed(dtype: torch.dtype, cache: bool) -> Body:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i in range(6):
            owner.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=dtype, cache_enabled=cache):
                out = net(images(i, size=16))
                outs = out if isinstance(out, tuple) else (out,)
                loss = torch.stack([(t.float() ** 2).mean() * (k + 1) for k, t in enumerate(outs)]).sum()
            (loss * 1024).backward()
            logs.append([("loss", loss.detach().clone()), *state(owner)])
        return logs

    return body


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", [SharedHead, Island])
def test_autocast_with_and_without_its_weight_cache(kind: type[nn.Module], cache: bool) -> None:
    different, graphs, _ = both(kind, mixed(torch.bfloat16, cache))
    assert different == []
    assert graphs.replays == 3


def test_the_weight_cache_matters() -> None:
    runs = []
    for cache in (True, False):
        net = fresh(SharedHead)
        runs.append(mixed(torch.bfloat16, cache)(net, net))
    assert any("head" in name for name in differing(*runs))


def test_a_backward_captured_inside_autocast_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.autocast

    def stuck(kind: str, *args: Any, enabled: bool = True, **kwargs: Any) -> Any:
        caller = __import__("sys")._getframe(1).f_code
        return contextlib.nullcontext() if caller.co_name == "backward" else real(kind, *args, enabled=enabled, **kwargs)

    monkeypatch.setattr(torch, "autocast", stuck)
    different, graphs, _ = both(Island, mixed(torch.bfloat16, True))
    assert graphs.replays == 3
    assert different


def test_a_backward_inside_the_callers_autocast_is_never_replayed() -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i in range(6):
            owner.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                net(images(i, size=16)).square().sum().backward()
            logs.append(state(owner))
        return logs

    different, graphs, _ = both(Island, body)
    assert (different, graphs.captures) == ([], 0)
    different, graphs, _ = both(Island, lambda net, owner: mixed(torch.bfloat16, True)(net, owner) + body(net, owner))
    assert different == []
    assert graphs.replays >= 4


def test_half_precision_with_a_scaler() -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**22, growth_interval=3)  # overflows at first
        optimizer, logs = torch.optim.SGD(owner.parameters(), lr=0.1, momentum=0.9), []
        for i in range(10):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = objective(net(images(i)))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(owner.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            logs.append([("scale", torch.tensor(scaler.get_scale())), ("loss", loss.detach().clone()), *state(owner)])
        return logs

    different, graphs, lines = both(Small, body)
    assert different == []
    assert (graphs.captures, graphs.replays, lines) == (1, 7, [])


# ---------------------------------------------------------------- trajectories
@pytest.mark.parametrize(
    ("name", "every", "set_to_none"), [("adamw", 2, True), ("adamw", 1, False), ("sgd", 1, True), ("sgd", 2, False)]
)
def test_trajectory(name: str, every: int, set_to_none: bool) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        if name == "adamw":
            return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)

    different, graphs, lines = both(Small, trajectory(make, every, set_to_none, amp=every == 2))
    assert different == []
    assert (graphs.captures, graphs.replays) == (4, 8)
    assert lines == []


def test_a_changed_branch_is_invalidated() -> None:
    class Branch(Small):
        late = False

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)
            return {**out, "box": out["box"] * 2} if self.late else out

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = plainly(net, owner, 5)
        owner.late = True  # type: ignore[assignment]
        if isinstance(net, TrainGraphs):
            net.invalidate("the late branch")
        return logs + plainly(net, owner, 5, start=5)

    different, graphs, _ = both(Branch, body)
    assert different == []
    assert graphs.captures == 2
    net = fresh(Branch)  # and without the call the graph goes on as it was
    graphs = TrainGraphs(net)
    plainly(graphs, net, 4)
    stale = graphs(images(9))["box"].detach()
    net.late = True  # type: ignore[assignment]
    torch.manual_seed(3)
    first = graphs(images(9))["box"].detach()
    torch.manual_seed(3)
    assert not same_bits(first, net(images(9))["box"].detach())
    assert stale.shape == first.shape


def test_moved_weights_are_noticed() -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = plainly(net, owner, 5)
        owner.box.weight = nn.Parameter(owner.box.weight.detach() * 2)  # type: ignore[union-attr, operator]
        logs += plainly(net, owner, 5, start=5)
        owner.conv.weight.data = owner.conv.weight.data.clone() + 1  # type: ignore[union-attr, operator]
        logs += plainly(net, owner, 5, start=10)
        owner.norm.eval()  # type: ignore[operator]
        logs += plainly(net, owner, 5, start=15)
        owner.conv.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
        return logs + plainly(net, owner, 5, start=20)

    different, graphs, _ = both(Small, body)
    assert different == []
    assert graphs.captures == 5


# ---------------------------------------------------------------- how gradients arrive
class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bias = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x) + self.bias
        return y, y.tanh()


def permuted(out: tuple[Tensor, Tensor]) -> Tensor:
    return (out[0].permute(0, 2, 3, 1).reshape(-1, 6).softmax(-1) ** 3).sum() + out[1].square().mean()


def expanded(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0].sum() * 0.1 + out[1].square().mean()


def one(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[1].square().mean()


def losses(sequence: list[Callable[[Any], Tensor]]) -> Body:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i, loss in enumerate(sequence):
            owner.zero_grad(set_to_none=True)
            loss(net(images(i, 4, 16))).backward()
            logs.append(state(owner))
            update(owner)
        return logs

    return body


@pytest.mark.parametrize("loss", [permuted, expanded, one], ids=lambda f: f.__name__)
def test_a_layout_of_gradients(loss: Any) -> None:
    different, graphs, _ = both(Wide, losses([loss] * 7))
    assert different == []
    assert (graphs.captures, graphs.replays) == (1, 4)


def test_layouts_that_change_midway() -> None:
    different, graphs, _ = both(Wide, losses([*[permuted] * 5, *[one] * 5, *[expanded] * 5, *[permuted] * 3]))
    assert different == []
    assert graphs.captures == 3
    assert graphs.replays >= 10


def test_layouts_that_never_settle_stay_eager() -> None:
    different, graphs, _ = both(Wide, losses([permuted, one] * 12))
    assert different == []
    assert graphs.eager["its gradients, or tensors that it reads, change from step to step"] >= 8


def test_a_buffer_laid_out_otherwise_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "blank", lambda t, wanted: None if wanted is None else torch.zeros(t.shape, device="cuda"))
    different, graphs, _ = both(Wide, losses([permuted] * 7))
    assert graphs.replays == 4
    assert different


def test_outputs_that_are_inputs_constants_and_twice_the_same() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor, scale: float, *, mask: Tensor) -> Any:
            y = self.conv(x * mask) * scale
            return {"y": [y, y], "x": x, "n": 3, "none": None, "view": y.flatten(1)}

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i in range(6):
            owner.zero_grad(set_to_none=True)
            x, mask = images(i), images(50 + i)
            out = net(x, 0.5, mask=mask)
            assert out["x"] is x
            assert out["y"][0] is out["y"][1]
            assert (out["n"], out["none"]) == (3, None)
            (out["y"][1].square().mean() + out["view"].exp().mean()).backward()
            logs.append([("view", out["view"].detach().clone()), *state(owner)])
        return logs

    different, graphs, _ = both(Odd, body)
    assert different == []
    assert graphs.replays == 3


def test_results_are_not_overwritten_by_the_next_step() -> None:
    net = fresh(Small)
    graphs = TrainGraphs(net)
    plainly(graphs, net, 4)
    first = graphs(images(1))["box"]
    kept = first.detach().clone()
    first.sum().backward()
    graphs(images(2))["box"].sum().backward()
    assert graphs.replays == 3
    assert same_bits(first.detach(), kept)


def test_gradients_reach_what_comes_before_the_network() -> None:
    class Neck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * x.mean()

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        torch.manual_seed(5)
        stem, logs = nn.Conv2d(3, 3, 3).to("cuda"), []
        for i in range(6):
            owner.zero_grad(set_to_none=True)
            stem.zero_grad(set_to_none=True)
            net(stem(images(i))).square().mean().backward()
            logs.append([("stem", stem.weight.grad), *state(owner)])
        return logs

    different, graphs, _ = both(Neck, body)
    assert different == []
    assert graphs.replays == 3


# ---------------------------------------------------------------- unusual orders
def warmed(net: Callable[..., Any], owner: nn.Module) -> None:
    plainly(net, owner, 5)
    owner.zero_grad(set_to_none=True)


def order(inner: Callable[[Callable[..., Any], nn.Module], None]) -> Body:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        warmed(net, owner)
        inner(net, owner)
        return [state(owner), *plainly(net, owner, 3, start=20)]

    return body


def two_forwards(net: Callable[..., Any], owner: nn.Module) -> None:
    (objective(net(images(10))) + objective(net(images(11)))).backward()


def two_forwards_two_backwards(net: Callable[..., Any], owner: nn.Module) -> None:
    a, b = objective(net(images(10))), objective(net(images(11)))
    b.backward()
    a.backward()


def eval_between(net: Callable[..., Any], owner: nn.Module) -> None:
    loss = objective(net(images(10)))
    owner.eval()
    with torch.no_grad():
        net(images(11))
    owner.train()
    loss.backward()


def average_between(net: Callable[..., Any], owner: nn.Module) -> None:
    loss = objective(net(images(10)))
    with torch.no_grad():
        copy.deepcopy(owner)(images(11))
    loss.backward()


def other_shape_between(net: Callable[..., Any], owner: nn.Module) -> None:
    loss = objective(net(images(10)))
    objective(net(images(11, size=10))).backward()
    loss.backward()


def backward_twice(net: Callable[..., Any], owner: nn.Module) -> None:
    loss = objective(net(images(10)))
    loss.backward(retain_graph=True)
    torch.rand(3, device="cuda")
    loss.backward()


def one_head_after_the_other(net: Callable[..., Any], owner: nn.Module) -> None:
    out = net(images(10))
    out["box"].square().mean().backward(retain_graph=True)
    out["score"].square().mean().backward()


def no_backward(net: Callable[..., Any], owner: nn.Module) -> None:
    net(images(10))
    objective(net(images(11))).backward()


def zeroed(net: Callable[..., Any], owner: nn.Module) -> None:
    for i in range(3):
        owner.zero_grad(set_to_none=False)
        objective(net(images(10 + i))).backward()


def zeroed_after_handing_out(net: Callable[..., Any], owner: nn.Module) -> None:
    objective(net(images(9))).backward()
    zeroed(net, owner)


def accumulated(net: Callable[..., Any], owner: nn.Module) -> None:
    for i in range(4):
        objective(net(images(10 + i))).backward()


def captured_between(net: Callable[..., Any], owner: nn.Module) -> None:
    """The second forward captures, while the eager one before it waits: what that one saved must be left alone."""
    for i in range(3):
        objective(net(images(i, size=10))).backward()
    first, second = objective(net(images(10, size=12))), objective(net(images(11, size=10)))
    first.backward()
    second.backward()


ORDERS = [
    captured_between,
    two_forwards,
    two_forwards_two_backwards,
    eval_between,
    average_between,
    other_shape_between,
    backward_twice,
    one_head_after_the_other,
    no_backward,
    zeroed,
    zeroed_after_handing_out,
    accumulated,
]


@pytest.mark.parametrize("inner", ORDERS, ids=lambda f: f.__name__)
def test_orders(inner: Callable[[Callable[..., Any], nn.Module], None]) -> None:
    different, graphs, lines = both(Small, order(inner))
    assert different == []
    assert graphs.replays >= 5
    assert lines == []


def penalised(net: Callable[..., Any], owner: nn.Module, steps: int = 5) -> list[Log]:
    logs = []
    for i in range(steps):
        owner.zero_grad(set_to_none=True)
        weights = list(owner.box.parameters())  # type: ignore[union-attr, operator]
        slopes = torch.autograd.grad(net(images(i))["box"].exp().sum(), weights, create_graph=True)
        torch.stack([s.square().sum() for s in slopes]).sum().backward()
        logs.append(state(owner))
    return logs


def test_double_backward_is_eager_or_a_named_error() -> None:
    different, graphs, _ = both(Small, penalised)
    assert (different, graphs.captures) == ([], 0)
    net = fresh(Small)
    graphs = TrainGraphs(net)
    warmed(graphs, net)
    with pytest.raises(step.DoubleBackward, match="create_graph=True"):
        penalised(graphs, net)


def held(how: str) -> Body:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        warmed(net, owner)
        kept: list[Tensor] = []
        for i in range(5):
            owner.zero_grad(set_to_none=True)
            loss = objective(net(images(10 + i)))
            if how == "grad":
                kept += torch.autograd.grad(loss, [owner.conv.weight, owner.box.bias])  # type: ignore[union-attr, list-item]
            else:
                loss.backward()
                assert isinstance(owner.conv, nn.Conv2d)
                assert owner.conv.weight.grad is not None
                kept.append(owner.conv.weight.grad if how == "p.grad" else owner.conv.weight.grad[0])
        return [[(f"kept {i}", k.clone()) for i, k in enumerate(kept)], *plainly(net, owner, 2, start=30)]

    return body


@pytest.mark.parametrize("how", ["p.grad", "view", "grad"])
def test_held_gradients_keep_their_values(how: str) -> None:
    different, graphs, _ = both(Small, held(how))
    assert different == []
    assert graphs.replays >= 6
    assert graphs.captures == 2  # once anew, with gradients copied from then on


def test_gradients_are_the_graphs_memory_only_while_nobody_accumulates() -> None:
    net = fresh(Small)
    graphs = TrainGraphs(net)
    plainly(graphs, net, 5)
    (recording,) = graphs._recordings.values()
    used = [p for n, p in net.named_parameters() if not n.startswith("spare")]
    assert all(recording.backward.owns(p.grad) for p in used)
    objective(graphs(images(1))).backward()
    assert not any(recording.backward.owns(p.grad) for p in used)


def test_gradients_dropped_between_forward_and_backward_are_never_moved() -> None:
    net = fresh(Small)
    graphs = TrainGraphs(net)
    for i in range(8):
        loss = objective(graphs(images(i)))
        net.zero_grad(set_to_none=True)  # as a loop that drops them as late as it can
        loss.backward()
        update(net)
    (recording,) = graphs._recordings.values()
    assert (graphs.replays, recording.handout.moved) == (5, 0)
    objective(graphs(images(1))).backward()
    assert recording.handout.moved > 0


def test_two_parameters_of_one_gradient_do_not_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 3, 8, 8)), nn.Parameter(torch.randn(4, 3, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a + self.b

    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i in range(6):
            owner.zero_grad(set_to_none=True)
            net(images(i)).square().sum().backward()
            for p in owner.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)
            logs.append(state(owner))
        return logs

    different, graphs, _ = both(Sum, body)
    assert different == []
    assert graphs.replays == 3


def test_named_errors() -> None:
    net = fresh(Small)
    graphs = TrainGraphs(net)
    warmed(graphs, net)
    loss = objective(graphs(images(1)))
    loss.backward(retain_graph=True)
    objective(graphs(images(2))).backward()
    with pytest.raises(StaleGraph, match="a later forward has overwritten"):
        loss.backward()
    out = graphs(images(3))["box"]
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
    loss = objective(graphs(images(4)))
    update(net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss  # else the next forward would be eager
    loss = objective(graphs(images(5)))
    graphs.invalidate("midway")
    loss.backward(retain_graph=True)
    with pytest.raises(StaleGraph, match="before invalidate"):
        loss.backward()


# ---------------------------------------------------------------- failures
def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool, when: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if not when(*args, **kwargs):
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        raise RuntimeError("injected")

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "point", ["capture of forward", "capture of backward", "input copy", "forward", "outputs", "gradient copy", "backward", "gradients"]
)
def test_a_failure_goes_on_eagerly(point: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def nth(n: int) -> Callable[..., bool]:
        def count(*args: Any, **_: Any) -> bool:
            seen.append(args)
            return len(seen) == n

        return count

    owner, name, n = {
        "capture of forward": (torch.cuda.CUDAGraph, "capture_end" if after else "capture_begin", 1),
        "capture of backward": (torch.cuda.CUDAGraph, "capture_end" if after else "capture_begin", 2),
        "input copy": (Intake, "fill", 3),
        "forward": (torch.cuda.CUDAGraph, "replay", 3),
        "outputs": (Outlet, "hand_out", 2),
        "gradient copy": (Intake, "fill", 4),
        "backward": (torch.cuda.CUDAGraph, "replay", 4),
        "gradients": (gradients.Handout, "take", 2),
    }[point]
    failing(monkeypatch, owner, name, after, nth(n))
    different, graphs, lines = both(Small, lambda net, own: plainly(net, own, 9, clear=False))
    assert different == []
    assert len(lines) == 1
    assert "injected" in lines[0]
    assert graphs.reason
    assert graphs.replays <= 2


def test_a_lost_context_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    net, lines = fresh(Small), list[str]()
    graphs = TrainGraphs(net, log=lines.append)
    warmed(graphs, net)

    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graphs(images(0))
    assert len(lines) == 1
    assert "no fallback exists" in lines[0]


class Syncing(Small):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = super().forward(x)
        return out if out["box"].sum().item() < 1e9 else {}


class Rolling(Small):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x * 2 if random.random() < 0.5 else x)


class Writing(Small):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x.mul_(1.5))


class Hiding(Small):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = {"weight": nn.Parameter(torch.ones(1))}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x * self.hidden["weight"].to(x.device))


class Remembering(Small):
    last: Any = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.last is not None:
            x = x + self.last * 0.1
        self.last = x.detach()
        return super().forward(x)


class Deriving(Small):
    """Keeps something computed from its weights until their version moves."""

    seen: Any = -1
    derived: Any = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.seen != self.conv.weight._version:
            self.seen, self.derived = self.conv.weight._version, self.conv.weight.detach().mean().reshape(1)
        return super().forward(x * self.derived)


class Replacing(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls = self.calls + 1
        return super().forward(x * self.calls)


class Checkpointing(Small):
    """Draws in what the backward runs again, from a generator that is put back for it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(checkpoint(lambda x: self.drop(x * self.conv.weight.mean()).sin(), x, use_reentrant=False))


class Seeding(Small):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        torch.manual_seed(7)
        return super().forward(x)


class Teaching(Small):
    """Its teacher follows in the forward, past the version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Conv2d(3, 8, 3, padding=1).requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.teacher.weight.data.mul_(0.9).add_(self.conv.weight.detach(), alpha=0.1)
        return super().forward(x * self.teacher(x).mean())


REFUSED = {
    Checkpointing: "torch.cuda.set_rng_state sets the random generator",
    Seeding: "torch.cuda.manual_seed_all sets the random generator",
    Teaching: "writes to parameter teacher.weight",
    Syncing: "host-sync",
    Rolling: "host-state",
    Writing: "input-mutation",
    Hiding: "no parameter of the module",
    Remembering: "changes last",
    Deriving: "changes derived",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda k: k.__name__)
def test_what_cannot_be_captured_stays_eager(kind: type[nn.Module]) -> None:
    different, graphs, lines = both(kind, plainly)
    assert different == []
    assert (graphs.captures, len(lines)) == (0, 1)
    assert REFUSED[kind] in lines[0]


def test_a_checkpoint_that_draws_nothing_is_captured() -> None:
    class Drawless(Checkpointing):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.0)

    different, graphs, _ = both(Drawless, plainly)
    assert different == []
    assert graphs.replays


def test_a_buffer_replaced_at_each_step_is_never_captured() -> None:
    different, graphs, lines = both(Replacing, plainly)
    assert (different, graphs.captures, lines) == ([], 0, [])


def test_off_distributed_and_host_runs_are_eager_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    different, graphs, lines = both(Small, plainly, enabled=False)
    assert (different, graphs.captures, len(lines)) == ([], 0, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    different, graphs, lines = both(Small, plainly)
    assert (different, graphs.captures, len(lines)) == ([], 0, 1)
    assert "distributed" in lines[0]
    net, said = nn.Linear(2, 2), list[str]()
    graphs = TrainGraphs(net, log=said.append)
    for _ in range(5):
        graphs(torch.ones(1, 2)).sum().backward()
    assert len(said) == 1


class Anchored(Small):
    """Keeps anchors for the last shape it saw, in one attribute for the shape and one for the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: Any = None
        self.anchors: Any = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.shape != x.shape:
            self.anchors = torch.linspace(0, 1, x.shape[-1], device=x.device)
            self.shape = x.shape
        return super().forward(x * self.anchors)


def sized(net: Callable[..., Any], owner: nn.Module, sizes: tuple[int, ...]) -> list[Log]:
    logs = []
    for i, size in enumerate(sizes):
        owner.zero_grad(set_to_none=True)
        objective(net(images(20 + i, size=size))).backward()
        logs.append(state(owner))
    return logs


@pytest.mark.parametrize(
    ("sizes", "replays"), [((8,) * 5 + (12, 12) + (8,) * 4, 5), ((8, 12) * 6, 0), ((8,) * 4 + (12,) * 5 + (8, 8) * 2 + (12,) * 2, 7)]
)
def test_a_cache_replaced_by_another_shape(sizes: tuple[int, ...], replays: int) -> None:
    different, graphs, lines = both(Anchored, lambda net, owner: sized(net, owner, sizes))
    assert (different, lines) == ([], [])
    assert graphs.replays >= replays
    assert graphs.captures <= 2


def test_more_shapes_than_graphs() -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i in range(15):
            owner.zero_grad(set_to_none=True)
            objective(net(images(i, size=6 + i % 3))).backward()
            logs.append(state(owner))
        return logs

    different, graphs, _ = both(Small, body, max_graphs=2)
    assert different == []
    assert (graphs.captures, graphs.eager["more than 2 graphs"]) == (2, 2)
    with pytest.raises(ValueError, match="threshold=0"):
        TrainGraphs(nn.Linear(1, 1), threshold=0)


def test_ever_new_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_COUNTED", 4)
    different, graphs, _ = both(Small, lambda net, owner: sized(net, owner, (8, 8, 8, 8, *range(9, 20), 8, 8)))
    assert (different, graphs.captures, graphs.replays) == ([], 1, 3)
    assert max(map(len, (graphs._known, graphs._expected, graphs._counts, graphs._wrong, graphs._open))) <= 5


# ---------------------------------------------------------------- the comparisons can fail
def dropped(taken: list[Tensor | None]) -> list[Tensor | None]:
    return [None, *taken[1:]]


def swapped(taken: list[Tensor | None]) -> list[Tensor | None]:
    norm = [i for i, g in enumerate(taken) if g is not None and g.shape == (8,)]
    taken[norm[0]], taken[norm[1]] = taken[norm[1]], taken[norm[0]]
    return taken


@pytest.mark.parametrize("change", [dropped, swapped], ids=lambda f: f.__name__)
def test_sabotaged_gradients_are_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gradients.Handout.take
    monkeypatch.setattr(gradients.Handout, "take", lambda self: change(real(self)))
    different, graphs, _ = both(Small, plainly)
    assert graphs.replays == 5
    assert any("grad:" in name for name in different)


def test_sabotaged_accumulation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients.Handout, "settle", lambda self: True)
    for inner in (accumulated, zeroed_after_handing_out):
        different, _, _ = both(Small, order(inner))
        assert any("grad:" in name for name in different)
    assert both(Small, held("view"))[0]


def test_sabotaged_random_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.Step.forward

    def drawing(self: step.Step) -> list[Tensor]:
        torch.rand(1, device="cuda")
        return real(self)

    monkeypatch.setattr(step.Step, "forward", drawing)
    assert any("generator" in name for name in both(Small, plainly)[0])


def test_sabotaged_generator_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward.rng, "restore", lambda _: None)
    assert any("generator" in name for name in both(Small, plainly)[0])


def test_sabotaged_buffers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = backward.aliased
    monkeypatch.setattr(backward, "aliased", lambda module, copies: real(module, copies=False))
    assert any("buffer:norm" in name for name in both(Small, plainly)[0])


@pytest.mark.parametrize("what", ["undo", "again"])
def test_sabotaged_redoing_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "undo":
        monkeypatch.setattr(step.Step, "undo", lambda self: None)
    else:
        monkeypatch.setattr(step.rng, "restore", lambda _: None)
    assert both(Small, order(backward_twice))[0]


# ---------------------------------------------------------------- obedience to the allowlist
def listing(folder: Path, *, torch_version: str = torch.__version__, size: int = 8) -> Path:
    """An allowlist with one training certificate, as evidence would give it."""
    environment = replace(here("1.0"), torch=torch_version)
    tried = (Tried(size, 4, "float32", ((4, 3, size, size), (4,))),)  # a batch: what the network is given, then targets
    certificate = Certificate("zoo", "net", "detect", "training", "here", environment, tried, grade="exact", proof=("same bits",))
    body = {"schema": SCHEMA, "environments": ["here"], "certificates": [certificate.to_dict()]}
    path = folder / f"{len(list(folder.iterdir()))}-{FILE}"
    path.write_text(json.dumps(body | {"checksum": checksum(json.loads(json.dumps(body)))}))
    return path


NET = Identity("zoo", "net", "detect", "training", "1.0")


def test_an_unlisted_family_trains_eagerly_with_one_line(tmp_path: Path) -> None:
    path = listing(tmp_path)
    different, graphs, lines = both(Small, plainly, identity=replace(NET, family="other"), allowlist=path)
    assert (different, graphs.captures, len(lines)) == ([], 0, 1)
    assert "no certificate for family 'other', task 'detect', mode 'training' of zoo" in lines[0]
    assert "`parity certify --zoo zoo --family other --task detect --mode training`" in lines[0]
    different, graphs, lines = both(Small, plainly, identity=NET, allowlist=path)
    assert (different, graphs.captures, graphs.replays, lines) == ([], 1, 5, [])
    with pytest.raises(ValueError, match="policy='lenient'"):
        TrainGraphs(nn.Linear(1, 1), identity=NET, allowlist=path, policy="lenient")


GAPS = [{"torch_version": "1.0"}, {"size": 16}]


@pytest.mark.parametrize("gap", GAPS, ids=["environment", "shape"])
def test_what_no_certificate_covers_proves_itself(gap: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = step.Step.again
    monkeypatch.setattr(step.Step, "again", lambda self, grads: asked.append(1) or real(self, grads))
    path = listing(tmp_path, **gap)
    different, graphs, lines = both(Small, plainly, identity=NET, allowlist=path)
    assert (different, graphs.captures, graphs.replays, lines, asked) == ([], 1, 5, [], [1])
    different, graphs, lines = both(Small, plainly, identity=NET, allowlist=path, policy="strict")
    assert (different, graphs.captures, lines) == ([], 0, [])
    assert any("does not validate" in why for why in graphs.eager)
    asked.clear()
    both(Small, plainly, identity=NET, allowlist=listing(tmp_path))
    assert asked == []  # what it covers is trusted


@pytest.mark.parametrize("what", ["gradients", "output", "buffer", "stream"])
def test_a_first_use_that_fails_ends_with_eagers_numbers(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "gradients":
        real = gradients.Handout.take
        monkeypatch.setattr(gradients.Handout, "take", lambda self: swapped(real(self)))
    else:
        forward = step.Step.forward

        def wrong(self: step.Step) -> list[Tensor]:
            made = forward(self)
            if what == "output":
                made[0].add_(1)
            elif what == "buffer":
                self.recording.buffers[0].add_(1)
            else:
                torch.rand(1, device="cuda")
            return made

        monkeypatch.setattr(step.Step, "forward", wrong)
    different, graphs, lines = both(Small, plainly, identity=NET, allowlist=listing(tmp_path, torch_version="1.0"))
    assert different == []
    assert len(lines) == 1
    assert "was certified with torch 1.0" in lines[0]
    told = {
        "gradients": "2 gradients differ",
        "output": "an output differs",
        "buffer": "a buffer differs",
        "stream": "the random stream",
    }
    assert f"did not validate: {told[what]}" in lines[0]
    assert graphs.replays <= 1


def test_gradients_that_eager_itself_does_not_repeat_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = step.Step.again, iter(range(100))

    def noisy(self: step.Step, grads: list[Tensor | None]) -> list[Tensor | None]:
        found = real(self, grads)
        return [None if g is None else g + next(count) for g in found]

    monkeypatch.setattr(step.Step, "again", noisy)
    _, graphs, lines = both(Small, plainly, identity=NET, allowlist=listing(tmp_path, torch_version="1.0"))
    assert (graphs.replays, lines) == (5, [])


# ---------------------------------------------------------------- what a replay would not do
class Adds(nn.Module):
    """Hands a second output to its caller in a container that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.conv(x)
        more["aux"] = y * 2
        return y


def test_a_container_that_is_changed_is_not_captured() -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        logs = []
        for i in range(6):
            owner.zero_grad()
            more: dict[str, Tensor] = {}
            (net(images(i), more).sum() + more["aux"].sum()).backward()
            logs.append(state(owner))
        return logs

    different, _, lines = both(Adds, body)
    assert different == []
    assert "changes a container among its arguments" in lines[0]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_without_a_gradient_is_not_called(kind: str) -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        called: list[Any] = []
        for p in owner.parameters():
            getattr(p, kind)(called.append)
        logs = plainly(net, owner, 6)
        return [*logs, [("calls", torch.tensor(len(called)))]]

    different, graphs, _ = both(Small, body)
    assert different == []
    assert graphs.eager["a hook may lie where some backward gives no gradient"] == 3


def test_a_backward_hook_is_called_at_each_step() -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        called: list[Any] = []
        assert isinstance(owner.norm, nn.Module)
        owner.norm.register_full_backward_hook(lambda *_: called.append(1))
        logs = []
        for i in range(6):  # a capture runs it, too: over all steps, its calls may make up for those that replays leave out
            logs += plainly(net, owner, 1, start=i)
            logs.append([("calls", torch.tensor(len(called)))])
        return logs

    different, _, lines = both(Small, body)
    assert different == []
    assert "has a backward hook" in lines[0]


def test_features_that_a_hook_keeps_are_eagers() -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        found: dict[str, Tensor] = {}
        assert isinstance(owner.conv, nn.Module)
        owner.conv.register_forward_hook(lambda _, __, out: found.update(out=out.detach()))
        logs = []
        for i in range(6):
            logs += plainly(net, owner, 1, start=i)
            logs.append([("kept", found["out"].clone())])
        return logs

    different, _, lines = both(Small, body)
    assert different == []
    assert "a hook keeps" in lines[0]


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_what_a_hook_keeps_of_inputs_and_outputs_is_eagers(kind: str) -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        kept: list[Tensor] = []

        def keep(module: nn.Module, given: Any, *out: Any) -> None:
            kept.append((out[0]["box"] if out else given[0]).detach())

        getattr(owner, kind)(keep)
        logs = []
        for i in range(6):
            kept.clear()
            logs += plainly(net, owner, 1, start=i)
            logs.append([("kept", kept[-1].clone() if kept else torch.zeros(()))])
        return logs

    different, _, lines = both(Small, body)
    assert different == []
    assert "a hook keeps an input or an output" in lines[0]


def test_a_hook_that_keeps_nothing_is_captured_inside_autocast() -> None:
    """Whose cache keeps the casts of inputs that get a gradient."""
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Tanh()).to("cuda")
    net.register_forward_hook(lambda *_: None)
    graphs = TrainGraphs(net)
    for i in range(5):
        x = images(i).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            loss = graphs(x).sum()
        loss.backward()
    assert (graphs.replays, graphs.reason) == (2, "")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # torch 2.11 says so of hooks before the backward, too
def test_a_backward_hook_for_all_modules_is_called_at_each_step() -> None:
    def body(net: Callable[..., Any], owner: nn.Module) -> list[Log]:
        called: list[Any] = []
        handle = nn.modules.module.register_module_full_backward_pre_hook(lambda *_: called.append(1))
        logs = []
        try:
            for i in range(6):
                net(images(i)).sum().backward()
                logs.append([("calls", torch.tensor(len(called))), *state(owner)])
        finally:
            handle.remove()
        return logs

    different, _, lines = both(lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Tanh()), body)
    assert different == []
    assert "has a backward hook" in lines[0]


def test_an_interrupt_drops_graphs_that_followed_the_broken_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    net, other = fresh(Small), fresh(Small)
    graphs, second = TrainGraphs(net), TrainGraphs(other)
    warmed(graphs, net)
    warmed_up = plainly(second, other, 3)

    end = torch.cuda.CUDAGraph.capture_end

    def interrupted(self: Any) -> None:
        end(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "capture_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            second(images(9))
    assert (graphs._recordings, len(warmed_up)) == ({}, 3)
    assert not second.reason


def test_a_loss_that_is_kept_does_not_keep_its_batch() -> None:
    net = fresh(Small)
    graphs = TrainGraphs(net)
    losses, batches = [], []
    for i in range(8):
        x = images(i)
        losses.append(objective(graphs(x)))
        losses[-1].backward()
        batches.append(weakref.ref(x))
        del x
    gc.collect()
    assert graphs.replays == 5
    assert [b() is not None for b in batches] == [False] * 7 + [True]  # the last step may be redone
