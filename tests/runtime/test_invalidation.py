"""A graph is never replayed for a module that is no longer the one it was captured from. Each test: the next call equals eager."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.runtime import GraphRunner
from parity.runtime.emulated import device
from parity.runtime.invalidation import CLOCK, LOCAL, Watch, scope
from parity.runtime.state import same_bits


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with device(), torch.no_grad():
        torch.manual_seed(0)
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 4)
        self.extra: nn.Parameter | None
        self.register_parameter("extra", None)
        self.shift: Tensor | None
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.body(x))
        for tensor in (self.shift, self.extra, getattr(self, "late", None)):
            if tensor is not None:
                y = y + tensor
        return y.float()


def fresh() -> Tensor:
    return torch.randn(4, device="cuda")


def square() -> nn.Linear:
    return nn.Linear(4, 4).to("cuda")


class Quantized(nn.Module):
    """Integer weights and a scale, as a quantized layer keeps them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.abs().max() / 127
        self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def _data(m: Net) -> None:
    m.head.weight.data = torch.randn(4, 4, device="cuda")


def _transposed(m: Net) -> None:
    m.head.weight.data = m.head.weight.data.t()


def _parameter(m: Net) -> None:
    m.head.weight = nn.Parameter(torch.randn(4, 4, device="cuda"))


def _behind(m: Net) -> None:
    m.head._parameters["weight"] = nn.Parameter(torch.randn(4, 4, device="cuda"))


def _buffer(m: Net) -> None:
    m.shift = fresh()


def _set(m: Net) -> None:
    m.shift.set_(fresh())  # type: ignore[union-attr]


def _late(m: Net) -> None:
    m.register_buffer("late", fresh())


def _extra(m: Net) -> None:
    m.extra = nn.Parameter(fresh())


def _without(m: Net) -> None:
    m.shift = None


def _deleted(m: Net) -> None:
    del m.head.bias
    m.head.register_parameter("bias", None)


def _swapped(m: Net) -> None:
    m.body[1] = nn.Tanh()


def _layer(m: Net) -> None:
    m.head = square()


def _shared(m: Net) -> None:
    m.head = m.body[0]  # type: ignore[assignment]


def _appended(m: Net) -> None:
    m.body.append(square())


def _half(m: Net) -> None:
    m.to(torch.bfloat16)


def _round_trip(m: Net) -> None:
    m.to("cpu").to("cuda")


def _part(m: Net) -> None:
    m.head.to(torch.bfloat16).to(torch.float32)


def _state(m: Net) -> dict[str, Tensor]:
    return {k: torch.randn_like(v) for k, v in m.state_dict().items()}


def _assigned(m: Net) -> None:
    m.load_state_dict(_state(m), assign=True)


def _loaded(m: Net) -> None:
    m.load_state_dict(_state(m))


def _quantized(m: Net) -> None:
    m.head = Quantized(m.head)  # type: ignore[assignment]


def _in_place(m: Net) -> None:
    m.head.weight.mul_(0.5)


def _through_data(m: Net) -> None:
    m.head.weight.data.mul_(0.5)


CHANGES = [
    _data, _transposed, _parameter, _behind, _buffer, _set, _late, _extra, _without, _deleted, _swapped, _layer, _shared, _appended,
    _half, _round_trip, _part, _assigned, _loaded, _quantized, _in_place, _through_data,
]  # fmt: skip
UNSEEN_IN_A_SCOPE = {_data, _transposed, _behind, _set}
"""What torch tells nobody: seen by the full check, at the next outermost scope."""


def prepared() -> tuple[Net, GraphRunner, Callable[[], bool]]:
    model = Net().to("cuda").eval()
    runner = GraphRunner(model)

    def agrees() -> bool:
        x = torch.randn(2, 4, device="cuda").to(model.head.weight.dtype if model.head.weight.is_floating_point() else torch.float32)
        return same_bits(runner(x), model(x))

    return model, runner, agrees


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__.strip("_"))
def test_the_next_call_equals_eager(change: Callable[[Net], None]) -> None:
    model, runner, agrees = prepared()
    assert agrees()
    change(model)
    assert agrees()
    assert agrees()
    assert runner.info().eager.total() == 0


@pytest.mark.parametrize("change", [c for c in CHANGES if c not in UNSEEN_IN_A_SCOPE], ids=lambda c: c.__name__.strip("_"))
def test_the_next_call_within_the_same_scope_equals_eager(change: Callable[[Net], None]) -> None:
    model, _, agrees = prepared()
    with scope():
        assert agrees()
        change(model)
        assert agrees()


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__.strip("_"))
def test_the_next_scope_equals_eager(change: Callable[[Net], None]) -> None:
    model, _, agrees = prepared()
    with scope():
        assert agrees()
        change(model)
    with scope():
        assert agrees()


def test_without_a_look_the_changes_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "look", lambda self: "")
    model, _, agrees = prepared()
    assert agrees()
    model.head = square()
    assert not agrees()


def test_in_place_updates_keep_the_graph() -> None:
    model, runner, agrees = prepared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(3):
        assert agrees()
        optimizer.step()
        model.head.bias.add_(1)
    assert runner.info().captures == 1


def test_a_steady_call_in_a_scope_never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = Watch.look
    monkeypatch.setattr(Watch, "look", lambda self: looks.append(1) or look(self))
    _, runner, _ = prepared()
    x = torch.randn(2, 4, device="cuda")
    with scope():
        for _ in range(2):
            runner(x)
        looks.clear()
        with scope():
            for _ in range(5):
                runner(x)
        assert looks == []
        nn.Linear(1, 1)  # somebody registers something somewhere
        runner(x)
        runner(x)
        assert len(looks) == 1
    runner(x)
    runner(x)
    assert len(looks) == 3


def test_old_weights_are_not_kept_alive() -> None:
    model, runner, _ = prepared()
    runner(torch.randn(2, 4, device="cuda"))
    before = torch.cuda.memory_allocated()
    big = nn.Linear(512, 512).to("cuda")
    model.body.append(big)
    GraphRunner(model)
    model.body.pop(2)
    del big
    assert torch.cuda.memory_allocated() <= before


def test_a_copy_of_the_module_is_watched_apart() -> None:
    model, _, agrees = prepared()
    assert agrees()
    copy.deepcopy(model).head.weight.data = torch.zeros(4, 4, device="cuda")
    assert agrees()
    assert CLOCK.installed


# ---------------------------------------------------------------- derived tensors
class Derives(nn.Module):
    """Keeps a tensor computed from its weight and renews it when ``stale`` says so, as Python alone can see."""

    def __init__(self, renews: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.renews = renews
        self.table: Tensor | None = None
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        now = {"version": lambda: self.weight._version, "place": lambda: self.weight.data_ptr(), "told": lambda: 0}[self.renews]()
        if self.table is None or now != self.seen:
            self.seen, self.table = now, self.weight.detach() * 3
        return x + self.table


def derived(renews: str) -> tuple[Derives, Derives, GraphRunner, Callable[[], bool]]:
    """A graphed module and an eager twin: the twin's own caches are never touched by the runner."""
    model, twin = Derives(renews).to("cuda"), Derives(renews).to("cuda")
    runner = GraphRunner(model)

    def agrees() -> bool:
        x = torch.randn(4, device="cuda")
        return same_bits(runner(x), twin(x))

    return model, twin, runner, agrees


def _adamw(m: Derives) -> None:
    m.weight.grad = torch.ones_like(m.weight)
    torch.optim.AdamW([m.weight], lr=0.5, fused=True).step()
    m.table = None


def _ema(m: Derives) -> None:
    m.weight.data.copy_(torch.full((4,), 0.25, device="cuda"))
    m.table = None


def _data_write(m: Derives) -> None:
    m.weight.data.add_(1)
    m.table = None


def _pointer(m: Derives) -> None:
    m.weight.data = torch.full((4,), 7.0, device="cuda")


def _visible(m: Derives) -> None:
    m.weight.add_(1)


DERIVED = [
    ("told", _adamw), ("told", _ema), ("told", _data_write), ("place", _pointer), ("version", _visible),
]  # fmt: skip


@pytest.mark.parametrize(("renews", "change"), DERIVED, ids=lambda c: getattr(c, "__name__", c).strip("_"))
def test_what_was_derived_from_weights_is_renewed(renews: str, change: Callable[[Derives], None]) -> None:
    model, twin, runner, agrees = derived(renews)
    with scope():
        assert agrees()
        assert agrees()
    for m in (model, twin):
        change(m)
    with scope():
        assert agrees()
        assert agrees()
        assert agrees()
    assert runner.info().replays >= 4


def test_an_optimizer_step_drops_derived_graphs_though_no_version_moved() -> None:
    model, twin, runner, agrees = derived("told")

    class Silent(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(1)  # as fused kernels do: the version stays

    with scope():
        assert agrees()
        version = model.weight._version
        for m in (model, twin):
            Silent([m.weight]).step()
            m.seen = None  # the owner notices in Python alone, and still holds its old tensor
        assert model.weight._version == version
        assert agrees()
    assert runner.info().captures == 2


def test_modules_made_in_inference_mode_are_compared_at_every_scope() -> None:
    with torch.inference_mode():
        model, twin, runner, agrees = derived("told")
        assert model.weight.is_inference()
        for _ in range(2):
            with scope():
                assert agrees()
                assert agrees()
        for m in (model, twin):
            m.weight.mul_(2)
            m.seen = None
        with scope():
            assert agrees()
            assert agrees()
    assert runner.info().captures == 2
    assert runner.info().replays >= 3


class Classifies(nn.Module):
    """Text embeddings are neither parameter nor buffer; ``set_classes`` replaces them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.text: Tensor | None = None

    def set_classes(self, seed: int) -> Tensor:
        self.text = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to("cuda")
        return self.text

    def forward(self, x: Tensor) -> Tensor:
        assert self.text is not None
        return self.embed(x) @ self.text.t()


@pytest.mark.parametrize("kept", [False, True], ids=["old ones freed", "old ones still held by somebody"])
def test_set_classes(kept: bool) -> None:
    model = Classifies().to("cuda").eval()
    held = [model.set_classes(0)] if kept else []
    model.set_classes(0) if not kept else None
    runner, x = GraphRunner(model), torch.randn(2, 4, device="cuda")
    for seed in (0, 1, 1, 2):
        if seed:
            text = model.set_classes(seed)
            if kept:
                held.append(text)
            del text
        with scope():
            for _ in range(3):
                assert same_bits(runner(x), model(x))
    assert runner.info().replays >= 4


class OneEntry(nn.Module):
    """Anchors of one shape, replaced by the next shape: always the same values for a shape."""

    shape: Any = None
    anchors: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.shape != x.shape:
            self.shape, self.anchors = x.shape, torch.arange(x.numel(), device="cuda").reshape(x.shape) * 0.5
        return x + self.anchors


def test_a_superseded_tensor_of_the_same_bits_keeps_its_graph() -> None:
    model = OneEntry().to("cuda")
    runner = GraphRunner(model)
    with scope():
        for rows in (2, 3, 2, 3, 2, 2, 2, 3):
            x = torch.randn(rows, 4, device="cuda")
            assert same_bits(runner(x), OneEntry()(x))
        replays = runner.info().replays
        runner(x)
        assert runner.info().replays == replays + 1  # settled again: no eager call for ever
    assert runner.info().captures == 2
    assert runner.info().eager["a tensor that the graph reads was replaced"] >= 1


def test_an_attribute_needs_invalidate() -> None:
    class Scales(nn.Module):
        by = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    model, x = Scales(), torch.randn(3, device="cuda")
    runner = GraphRunner(model)
    runner(x)
    model.by = 3.0
    assert not same_bits(runner(x), model(x))  # documented: nobody sees it
    runner.invalidate("another scale")
    assert same_bits(runner(x), model(x))
    assert runner.info().dropped == {"another scale": 1}


def test_two_runners_of_one_module_do_not_drop_each_other() -> None:
    model = nn.Sequential(Derives("told"), nn.BatchNorm1d(4)).to("cuda").eval()
    first, second = GraphRunner(model), GraphRunner(lambda x: model(x) * 2, model)
    for _ in range(3):
        with scope():
            x = torch.randn(2, 4, device="cuda")
            assert same_bits(first(x) * 2, second(x))
    assert first.info().captures == second.info().captures == 1


def test_autocast_casts_weights_inside_the_graph() -> None:
    model = nn.Linear(4, 4).to("cuda")
    runner = GraphRunner(model)
    for _ in range(3):
        x = torch.randn(2, 4, device="cuda")
        with torch.autocast("cuda", torch.bfloat16), scope():
            model(x)  # fills the cache
            found = runner(x)
            assert torch.is_autocast_cache_enabled()
        with torch.autocast("cuda", torch.bfloat16):
            assert same_bits(found, model(x))
        model.weight.data.mul_(2)
    assert runner.info().captures == 1
    assert runner.info().replays == 3
    assert runner.entries()[0].derived is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x)[..., :2] + self.other(x)[..., :2]).float()


UNTIED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t(),
    "of another shape": lambda w: w[:2],
    "of other strides": lambda w: w.as_strided((4, 4), (1, 4)),
    "itself": lambda w: w.view(4, 4),
}


@pytest.mark.parametrize("way", UNTIED)
def test_a_tied_weight_that_becomes_a_view_of_its_memory(way: str) -> None:
    """Its address stays, and the first of the pair is as it was."""
    module = Tied().to("cuda")
    runner, x = GraphRunner(module), fresh()
    assert same_bits(runner(x), module(x))
    module.other._parameters["weight"] = nn.Parameter(UNTIED[way](module.one.weight.detach()))  # no hook sees this
    assert same_bits(runner(x), module(x))
    assert runner.info().dropped == (
        {} if way == "itself" else {"a parameter or buffer moved, was replaced or changed its type or shape": 1}
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch 2.11
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_what_torchscript_keeps_modules_in_is_looked_into() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    root = nn.Sequential(nn.Linear(4, 4), scripted)
    for module in (root, scripted):
        watch = Watch(module)
        assert watch.look() == ""
        assert len(watch.tensors()) == (4 if module is root else 2)
    root[0].weight.data = torch.ones(4, 4)
    watch = Watch(root)
    root[0].weight.data = torch.zeros(4, 4)
    assert watch.look() == "a parameter or buffer moved, was replaced or changed its type or shape"


def test_a_scope_that_another_thread_closes_is_closed() -> None:
    """As a server may do that reads a generator from a pool of threads."""

    def steps() -> Iterator[None]:
        with scope(3):
            yield

    suspended = steps()
    next(suspended)
    assert (LOCAL.visit > 0, LOCAL.after) == (True, 3)
    thread = threading.Thread(target=suspended.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert (LOCAL.visit, LOCAL.after) == (0, 1)


class Wrapped(Tensor):
    """As a quantized weight: what it holds lies elsewhere."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(held: dict[str, Tensor], *_: Any) -> Any:
        return Wrapped(held["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        return Wrapped(args[0].inner)


def test_what_a_wrapper_holds_is_looked_at() -> None:
    module = nn.Linear(3, 3)
    module.weight = nn.Parameter(Wrapped(torch.ones(3, 3)), requires_grad=False)
    watch = Watch(module)
    assert watch.look() == ""
    kept = module.weight
    module.weight = nn.Parameter(Wrapped(torch.ones(3, 3)), requires_grad=False)
    assert watch.look() != ""
    assert watch.look() == ""
    module.weight.inner = torch.ones(3, 3)  # type: ignore[attr-defined]
    assert watch.look() != ""
    assert kept.inner is not None  # alive, so that its address is its own


class Negated(Tensor):
    """Another computation on the same memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return -out if func is nn.functional.linear else out


def test_another_type_on_the_same_memory_is_noticed() -> None:
    model, x = square(), torch.ones(2, 4, device="cuda")
    runner = GraphRunner(model)
    runner(x)
    model._parameters["weight"] = model.weight.data.as_subclass(Negated)  # type: ignore[assignment]
    assert same_bits(runner(x).as_subclass(Tensor), model(x).as_subclass(Tensor))
