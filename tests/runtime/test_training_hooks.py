"""Hooks, of modules, weights, inputs and outputs: each is called as often as in an eager run, with what eager gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.runtime import TrainGraphs, step
from parity.runtime.buffers import Outlet
from parity.runtime.emulated import device

from .steps import Body, Log, Small, both, fresh, images, objective, plainly, state, update


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with device():
        yield
    torch.set_num_threads(threads)


class Plain(nn.Module):
    """Every weight gets a gradient from each output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.drop, self.head = nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.tanh(self.stem(x.mean((2, 3))))))
        return out


class Two(Plain):
    """Two outputs, each with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.drop(torch.tanh(self.stem(x.mean((2, 3)))))
        return self.head(h), self.other(h)


class Calls:
    """Counts, per name, and keeps the sum of what came."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Tensor]] = []

    def of(self, name: str, factor: float = 1.0) -> Callable[[Any], Any]:
        def hook(given: Any) -> Any:
            value = given.grad if isinstance(given, nn.Parameter) else given
            self.told.append((name, torch.tensor(float("nan")) if value is None else value.detach().clone()))
            return None if isinstance(given, nn.Parameter) or given is None or factor == 1.0 else given * factor

        return hook

    def log(self) -> Log:
        told, self.told = sorted(self.told, key=lambda pair: pair[0]), []
        return [
            ("calls", torch.tensor(len(told))),
            *((f"heard {i}", t) for i, (_, t) in enumerate(told[:1])),
            ("names", torch.tensor([sum(map(ord, n)) for n, _ in told])),
        ]


def hooked(owner: nn.Module, calls: Calls, factor: float) -> None:
    for name, p in owner.named_parameters():
        p.register_hook(calls.of(f"hook {name}", factor))
        p.register_post_accumulate_grad_hook(calls.of(f"after {name}"))


def whole(i: int, out: Any) -> None:
    sum(o.square().mean() for o in (out if isinstance(out, tuple) else (out,))).backward()


def first_only_at_5(i: int, out: Any) -> None:
    whole(i, out[0] if i == 5 else out)


def one_by_one(i: int, out: Any) -> None:
    out[0].square().mean().backward(retain_graph=True)
    out[1].square().mean().backward()


def twice_at_5(i: int, out: Any) -> None:
    loss = sum(o.square().mean() for o in (out if isinstance(out, tuple) else (out,)))
    if i == 5:
        loss.backward(retain_graph=True)
        torch.rand(3, device="cuda")
    loss.backward()


def laid_out_at_5(i: int, out: Any) -> None:
    if i == 5:
        out.sum().backward()
    else:
        whole(i, out)


def none_at_5(i: int, out: Any) -> None:
    if i != 5:
        whole(i, out)


BACKWARDS: list[tuple[type[nn.Module], Callable[[int, Any], None]]] = [
    (Plain, whole),
    (Plain, twice_at_5),
    (Plain, laid_out_at_5),
    (Plain, none_at_5),
    (Two, whole),
    (Two, first_only_at_5),
    (Two, one_by_one),
    (Two, twice_at_5),
]


def heard(backward: Callable[[int, Any], None], how: str) -> Body:
    def body(net: Callable[..., Any], owner: Any) -> list[Log]:
        calls, logs = Calls(), []
        stem = None
        if how == "weights":
            hooked(owner, calls, 1.0)
        elif how == "changing weights":
            hooked(owner, calls, 0.5)
        elif how in ("stem", "input"):
            torch.manual_seed(9)
            stem = nn.Conv2d(3, 3, 1).to("cuda")
            hooked(stem, calls, 0.5)
        for i in range(8):
            owner.zero_grad(set_to_none=True)
            x = images(i)
            if stem is not None:
                stem.zero_grad(set_to_none=True)
                x = stem(x)
                if how == "input":
                    x.register_hook(calls.of("input", 0.5))
            elif how == "leaf":
                x.requires_grad_().register_hook(calls.of("leaf", 0.5))
            out = net(x)
            if how == "outputs":
                for k, o in enumerate(out if isinstance(out, tuple) else (out,)):
                    o.register_hook(calls.of(f"output {k}", 0.5))
            backward(i, out)
            extra: Log = [("x", x.grad)] if how == "leaf" else []
            logs.append([*calls.log(), *extra, *(state(stem) if stem is not None else []), *state(owner)])
            update(owner)
        return logs

    return body


@pytest.mark.parametrize("how", ["weights", "changing weights", "stem", "input", "leaf", "outputs"])
@pytest.mark.parametrize(("kind", "backward"), BACKWARDS, ids=lambda f: f.__name__)
def test_hooks_are_called_as_in_an_eager_run(kind: type[nn.Module], backward: Callable[[int, Any], None], how: str) -> None:
    different, graphs, lines = both(kind, heard(backward, how))
    assert (different, lines) == ([], [])
    assert graphs.captures or kind is Two


class Sides(nn.Module):
    """Its second output does not depend on its input, nor the first on ``free``."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.free = nn.Linear(3, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        return self.head(x.mean((2, 3))), self.free.exp()


def second_only_at_5(i: int, out: Any) -> None:
    whole(i, out[1] if i == 5 else out)


class Doubled(torch.autograd.Function):
    """Is given zeros where no gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("how", ["stem", "input", "leaf", "weights"])
def test_an_input_that_gets_no_gradient(how: str) -> None:
    different, _, lines = both(Sides, heard(second_only_at_5, how))
    assert (different, lines) == ([], [])


def test_no_gradient_is_not_zero() -> None:
    def body(net: Callable[..., Any], owner: Any) -> list[Log]:
        torch.manual_seed(9)
        stem, logs = nn.Conv2d(3, 3, 1).to("cuda"), []
        for i in range(8):
            owner.zero_grad(set_to_none=True)
            stem.zero_grad(set_to_none=True)
            second_only_at_5(i, net(Doubled.apply(stem(images(i)))))
            logs.append([*state(stem), *state(owner)])
        return logs

    different, _, lines = both(Sides, body)
    assert (different, lines) == ([], [])


def test_a_gradient_that_never_comes() -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    def body(net: Callable[..., Any], owner: Any) -> list[Log]:
        logs = []
        for i in range(8):
            owner.zero_grad(set_to_none=True)
            out = net(images(i))
            (Stop.apply(out) if i == 5 else out).square().mean().backward()
            logs.append(state(owner))
        return logs

    different, _, lines = both(Plain, body)
    assert (different, lines) == ([], [])


# ---------------------------------------------------------------- steps that are redone
def redone(between: Callable[[Any], None]) -> Body:
    """Step 5 is redone from its state in the backward, after ``between``."""

    def body(net: Callable[..., Any], owner: Any) -> list[Log]:
        logs = []
        for i in range(9):
            owner.zero_grad(set_to_none=True)
            out = net(images(i))
            if i == 5:
                between(owner)
                out["box"].sum().backward()
            else:
                objective(out).backward()
            logs.append([("training", torch.tensor([m.training for m in owner.modules()])), *state(owner)])
            owner.train()
            owner.requires_grad_(True)
            update(owner)
        return logs

    return body


def to_eval(owner: Any) -> None:
    owner.eval()


def to_frozen(owner: Any) -> None:
    owner.box.requires_grad_(False)


def to_partly_frozen(owner: Any) -> None:
    owner.norm.eval()
    owner.spare.requires_grad_(False)


def to_drawn(owner: Any) -> None:
    torch.rand(5, device="cuda")


@pytest.mark.parametrize("between", [to_eval, to_frozen, to_partly_frozen, to_drawn], ids=lambda f: f.__name__)
def test_a_redone_step_is_as_the_forward_was(between: Callable[[Any], None]) -> None:
    different, graphs, lines = both(Small, redone(between))
    assert (different, lines) == ([], [])
    assert graphs.captures


def test_a_redone_step_whose_weight_was_replaced_is_a_named_error() -> None:
    net = fresh(Small)
    graphs = TrainGraphs(net)
    plainly(graphs, net, 5)
    out = graphs(images(9))
    net.box.weight = nn.Parameter(net.box.weight.detach() * 2)  # type: ignore[union-attr, operator]
    with pytest.raises(step.StaleGraph, match="was replaced"):
        out["box"].sum().backward()


@pytest.mark.parametrize("failing", ["forward", "outputs"])
def test_a_replay_that_fails_is_redone_with_its_hooks_called_once(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    owner, name = (torch.cuda.CUDAGraph, "replay") if failing == "forward" else (Outlet, "hand_out")
    real = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            real(*args, **kwargs)
            raise RuntimeError("injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    different, graphs, lines = both(Plain, heard(whole, "changing weights"))
    assert different == []
    assert len(lines) == 1
    assert graphs.reason
