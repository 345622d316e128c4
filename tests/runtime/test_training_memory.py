"""State that Python keeps beside the buffers: a step that changes it is never captured; what a refused capture did to it is undone."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parity.runtime.emulated import device
from parity.runtime.memory import Memory, attributes_kept

from .steps import Small, both, plainly

Step = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with device():
        yield
    torch.set_num_threads(threads)


class Schedule:
    """Of a zoo's own."""

    def __init__(self) -> None:
        self.step = 0


class _Everywhere:
    count = 0


def _in_a_dict(kept: Any, x: Tensor) -> Tensor:
    kept["step"] += 1
    return x * (kept["step"] % 3)


def _in_a_list(kept: Any, x: Tensor) -> Tensor:
    kept.append(kept.pop(0))
    return x * kept[0]


def _in_a_deque(kept: Any, x: Tensor) -> Tensor:
    kept.rotate(1)
    return x * kept[0]


def _in_a_set(kept: Any, x: Tensor) -> Tensor:
    kept.add(len(kept))
    return x * (len(kept) % 3)


def _in_an_object(kept: Any, x: Tensor) -> Tensor:
    kept.step += 1
    return x * (kept.step % 3)


def _in_an_array(kept: Any, x: Tensor) -> Tensor:
    kept += 1
    return x * (int(kept[0]) % 3)


def _a_tensor(kept: Any, x: Tensor) -> Tensor:
    out = x if kept[0] is None else x + kept[0]
    kept[0] = x.detach().mean()
    return out


def _depth(draw: Callable[[Any], float]) -> Step:
    return lambda kept, x: x if draw(kept) < 0.5 else x * 2


KEEPING: dict[str, tuple[Callable[[], Any], Step, str]] = {
    # what is kept; what a step does with it; the place that is named
    "dict": (lambda: {"step": 0}, _in_a_dict, "changes kept['step']"),
    "ordered dict": (lambda: OrderedDict(step=0), _in_a_dict, "changes kept['step']"),
    "list": (lambda: [0, 1, 2], _in_a_list, "changes kept[0]"),
    "deque": (lambda: deque([0, 1, 2]), _in_a_deque, "changes kept[0]"),
    "set": (lambda: {0}, _in_a_set, "changes kept["),
    "object": (Schedule, _in_an_object, "changes kept.step"),
    "namespace": (lambda: SimpleNamespace(step=0), _in_an_object, "changes kept.step"),
    "array": (lambda: np.zeros(2000), _in_an_array, "changes kept of"),
    "tensor": (lambda: [None], _a_tensor, "changes kept[0]"),
    "Python's stream": (lambda: random.Random(0), _depth(lambda r: r.random()), "changes kept of"),
    "NumPy's stream": (lambda: np.random.default_rng(0), _depth(lambda r: r.random()), "changes kept of"),
    "NumPy's old stream": (lambda: np.random.RandomState(0), _depth(lambda r: r.rand()), "changes kept of"),
    "torch's stream": (
        lambda: torch.Generator().manual_seed(0),
        _depth(lambda r: torch.rand((), generator=r).item()),
        "changes kept of",
    ),
}


def keeping(name: str) -> Callable[[], nn.Module]:
    make, step, _ = KEEPING[name]

    class Keeping(Small):
        def __init__(self) -> None:
            super().__init__()
            self.kept = make()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return super().forward(step(self.kept, x))

    return Keeping


@pytest.mark.parametrize("name", KEEPING)
def test_a_step_that_moves_what_python_keeps_is_eager(name: str) -> None:
    different, graphs, lines = both(keeping(name), plainly)
    assert different == []
    assert (graphs.captures, len(lines)) == (0, 1)
    assert KEEPING[name][2] in lines[0]
    assert lines[0].endswith("[python-counter]")


@pytest.mark.parametrize("name", KEEPING)
def test_a_refused_capture_that_left_it_moved_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "restore", lambda self, *, tensors: None)
    different, graphs, _ = both(keeping(name), plainly)
    assert graphs.captures == 0
    assert different


@pytest.mark.parametrize("name", KEEPING)
def test_a_replay_that_leaves_it_where_it_is_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "change", lambda self, after: "")
    different, graphs, _ = both(keeping(name), plainly)
    assert different
    assert graphs.captures or name == "tensor"  # which dies between two steps


def test_a_count_of_the_class_is_seen() -> None:
    class Counts(Small):
        count = 0
        shared = {"step": 0}  # noqa: RUF012

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            type(self).count += 1
            return super().forward(x * (self.count % 3))

    def body(net: Any, owner: nn.Module) -> Any:
        Counts.count = 0
        return plainly(net, owner)

    different, graphs, lines = both(Counts, body)
    assert different == []
    assert graphs.captures == 0
    assert "Counts.count" in lines[0]


def test_a_cache_that_the_first_call_of_a_shape_fills_is_no_state() -> None:
    class Caches(Small):
        def __init__(self) -> None:
            super().__init__()
            self.grids: dict[Any, Tensor] = {}

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            if x.shape not in self.grids:
                self.grids[x.shape] = torch.linspace(0, 1, x.shape[-1], device=x.device)
            return super().forward(x + self.grids[x.shape])

    different, graphs, lines = both(Caches, plainly)
    assert (different, lines) == ([], [])
    assert graphs.replays


# ---------------------------------------------------------------- put back
def _holder(kept: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.kept = kept
    return module


@pytest.mark.parametrize("name", KEEPING)
def test_what_moved_is_put_back(name: str) -> None:
    make, step, _ = KEEPING[name]
    module = _holder(make())
    before = Memory(module)
    for _ in range(4):
        step(module.kept, torch.ones(2))
    assert before.change(Memory(module)) or name in ("list", "deque")
    before.restore(tensors=True)
    assert before.change(Memory(module)) == ""


def test_what_was_built_meanwhile_stays_where_tensors_do() -> None:
    module = _holder({"step": 1, "grid": None})
    before = Memory(module)
    grid = torch.ones(2)
    module.kept.update(step=2, grid=grid, more=3)  # type: ignore[operator]
    before.restore(tensors=False)
    assert module.kept == {"step": 1, "grid": None}
    module.kept["built"] = grid  # type: ignore[index]
    before.restore(tensors=False)
    assert module.kept["built"] is grid  # type: ignore[index]
    before.restore(tensors=True)
    assert module.kept == {"step": 1, "grid": None}


def test_an_error_puts_contents_back_and_success_does_not() -> None:
    module = _holder([1])
    with attributes_kept(module):
        module.kept.append(2)  # type: ignore[operator]
    assert module.kept == [1, 2]

    def fails() -> None:
        with attributes_kept(module):
            module.kept.append(3)  # type: ignore[operator]
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert module.kept == [1, 2]


def test_zeros_of_two_signs_and_types_differ_and_a_nan_is_itself() -> None:
    module = _holder([0.0, float("nan"), 1])
    before = Memory(module)
    assert before.change(Memory(module)) == ""
    for place, other in ((0, -0.0), (2, True)):
        old, module.kept[place] = module.kept[place], other  # type: ignore[index]
        assert before.change(Memory(module)) == f"kept[{place}]"
        module.kept[place] = old  # type: ignore[index]


# ---------------------------------------------------------------- other steps that a replay would not be
class ReadsItsGradient(Small):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        grad = self.conv.weight.grad
        return super().forward(x if grad is None else x * (1 + grad.abs().mean()))


class OtherOutputs(Small):
    calls: Any = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = super().forward(x)
        self.calls[0] += 1
        return out if self.calls[0] % 5 else {**out, "more": out["box"] * 2}


class Reentrant(Small):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {**out, "box": checkpoint(torch.sin, out["box"], use_reentrant=True)}


def test_a_forward_that_reads_a_gradient_is_not_captured() -> None:
    different, graphs, lines = both(ReadsItsGradient, lambda net, owner: plainly(net, owner, clear=False))
    assert different == []
    assert graphs.captures == 0
    assert "reads the gradient of a parameter" in lines[0]


def test_outputs_that_change_within_the_runs_of_a_capture_are_told() -> None:
    def body(net: Any, owner: Any) -> Any:
        owner.calls = [0]
        return plainly(net, owner)

    different, graphs, lines = both(OtherOutputs, body)
    assert different == []
    assert graphs.captures == 0
    assert "outputs are others from one step to the next" in lines[0]


def test_a_reentrant_checkpoint_is_told_with_the_other_form() -> None:
    different, graphs, lines = both(Reentrant, plainly)
    assert different == []
    assert graphs.captures == 0
    assert "use_reentrant=False [host-state]" in lines[0]
