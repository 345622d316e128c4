"""What a region reads and does not own: derived tensors are found, what is given or made is not, and death is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from parity.runtime.engine import engine
from parity.runtime.liveness import Guarded, held_tensors, hold, owned_storages, trace


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with engine("emulated").entered(), torch.no_grad():
        yield


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(3), persistent=False)
        self.caches: dict[str, Any] = {}


@pytest.fixture
def model() -> Model:
    return Model().to("cuda")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(3, device="cuda")


def paths(found: Any) -> list[str]:
    return [read.path for read in found.reads]


def test_inputs_weights_and_intermediates_are_not_derived(model: Model, x: torch.Tensor) -> None:
    found = trace(lambda v: (v * model.weight + model.offset).relu(), [x], model)
    assert found.reads == []
    assert trace(lambda v: v * model.weight, [x]).reads  # unless nobody says whose they are


def test_a_cached_tensor_is_derived_and_named(model: Model, x: torch.Tensor) -> None:
    model.caches["grid"] = [torch.ones(3, device="cuda")]
    (read,) = trace(lambda v: v + model.caches["grid"][0], [x], model).reads
    assert read.path == "caches['grid'][0]"
    assert (read.shape, read.dtype, read.nbytes) == ((3,), torch.float32, 12)
    assert "test_liveness.py:" in read.where
    assert str(read).startswith("caches['grid'][0] (3,) float32, first read at tests/runtime/test_liveness.py:")


def test_a_tensor_that_nobody_holds_under_a_name_is_derived_too(model: Model, x: torch.Tensor) -> None:
    hidden = torch.ones(3, device="cuda")
    found = trace(lambda v: v + hidden, [x], model)
    assert paths(found) == [""]
    assert str(found.reads[0]).startswith("a tensor that no module holds (3,) float32")


def test_a_view_is_its_storage(model: Model, x: torch.Tensor) -> None:
    assert trace(lambda v: v + model.weight[1:].sum(), [x[1:]], model).reads == []
    whole = torch.ones(8, device="cuda")
    found = trace(lambda v: v + whole[:3] + whole[3:6], [x], model)
    assert [r.nbytes for r in found.reads] == [32]


def test_host_tensors_are_not_read_by_a_graph(model: Model) -> None:
    host = torch.ones(3)
    assert trace(lambda v: v + host, [torch.ones(3)], model).reads == []


def test_what_a_call_makes_and_keeps_is_read_by_the_next(model: Model, x: torch.Tensor) -> None:
    def renews(v: torch.Tensor) -> torch.Tensor:
        model.caches["last"] = v * 2
        return v + model.caches["last"]

    assert paths(trace(renews, [x], model)) == ["caches['last']"]

    def drops(v: torch.Tensor) -> torch.Tensor:
        return v + v * 2

    assert trace(drops, [x], model).reads == []


def test_a_kept_output_is_the_outputs_own(model: Model, x: torch.Tensor) -> None:
    def keeps(v: torch.Tensor) -> torch.Tensor:
        model.caches["last"] = v * 2
        return model.caches["last"]

    assert trace(keeps, [x], model).reads == []


def test_a_replaced_buffer_is_derived_once_its_owner_lets_go(model: Model, x: torch.Tensor) -> None:
    def replaces(v: torch.Tensor) -> torch.Tensor:
        y = v + model.offset
        model.offset = model.offset + 1
        return y

    before = model.offset
    found = trace(replaces, [x], model)
    assert [r.dead for r in found.reads] == [False]
    del before, found.result
    assert [r.dead for r in found.reads] == [True]


def test_death_is_noticed_and_holding_prevents_it(model: Model, x: torch.Tensor) -> None:
    for held in (False, True):
        model.caches["grid"] = torch.ones(3, device="cuda")
        found = trace(lambda v: v + model.caches["grid"], [x], model)
        (read,) = found.reads
        keeping = hold(found.reads) if held else []
        assert not read.dead
        model.caches.clear()
        assert read.dead == (not held)
        assert len(keeping) == held
        if not held:
            assert hold(found.reads) == []


def test_a_write_to_an_input_is_told_by_its_position(x: torch.Tensor) -> None:
    other = torch.ones(3, device="cuda")
    assert trace(lambda a, b: b.add_(1), [x, other]).written == [1]
    assert trace(lambda a, b: torch.add(a, 1, out=b), [x, other]).written == [1]
    assert trace(lambda a, b: a[1:].zero_() + b[1:], [x, other]).written == [0]
    assert trace(lambda a, b: a + b, [x, other]).written == []
    assert trace(lambda a, b: (a + b).add_(1), [x, other]).written == []


@pytest.mark.parametrize(
    ("region", "cause"),
    [
        (lambda v: v * v.sum().item(), "host-sync"),
        (lambda v: v if v.sum() > 0 else -v, "host-sync"),
        (lambda v: v.tolist(), "host-sync"),
        (lambda v: v * torch.tensor([1.0, 2.0, 3.0], device="cuda"), "h2d-copy"),
        (lambda v: v[v > 0], "data-dependent-shape"),
        (lambda v: v.nonzero(), "data-dependent-shape"),
    ],
)
def test_what_a_capture_would_refuse_is_named_with_its_line(region: Any, cause: str, x: torch.Tensor) -> None:
    """Copies aside: here both sides lie on the host by the time a dispatch mode sees them; the emulated capture refuses them itself."""
    found = trace(region, [x])
    assert found.violations[0][0].cause == cause
    assert "test_liveness.py:" in found.violations[0][1]


def test_a_clean_region_has_nothing_to_tell(x: torch.Tensor) -> None:
    found = trace(lambda v: (v * 2).relu(), [x])
    assert (found.violations, found.written, found.unseen, found.random) == ([], [], [], False)


def test_draws_and_foreign_ops_are_told(x: torch.Tensor) -> None:
    assert trace(lambda v: v + torch.rand_like(v), [x]).random
    assert trace(lambda v: nn.functional.dropout(v, 0.5, training=True), [x]).random
    with torch.library._scoped_library("parity_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda v: v * 2, "CompositeExplicitAutograd")
        assert trace(torch.ops.parity_tests.twice, [x]).unseen == ["parity_tests::twice"]


def test_tensors_among_a_modules_attributes() -> None:
    model = nn.Sequential(Model(), nn.ReLU())
    one, two = torch.zeros(1), torch.zeros(1)
    model[0].caches = {"a": [one, {"b": (two,)}], 3: one}
    model[0].itself = model[0].caches
    model.top = two
    circle: list[Any] = [one]
    circle.append(circle)
    model[1].circle = circle
    assert [p for p, _ in held_tensors(model)] == ["top", "0.caches['a'][0]", "0.caches['a'][1]['b'][0]", "0.caches[3]", "1.circle[0]"]
    assert len(owned_storages(model)) == 2
    assert owned_storages(None) == set()


def test_lines_on_another_stream_are_told(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()

    def region(v: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            w = v.exp()  # aside
        torch.cuda.current_stream().wait_stream(side)
        return w + v

    (line,) = trace(region, [x]).aside
    assert "# aside" in line or "v.exp()" in line


def test_what_is_written_to_is_put_back_through_any_alias(model: Model, x: torch.Tensor) -> None:
    before = [p.detach().clone() for p in (model.weight, model.offset)]
    with Guarded([("weight", model.weight), ("offset", model.offset)]) as guard:
        model.weight.data.mul_(2)
        model.weight.view(3, 1)[0] += 1
        model.offset + 1
    assert list(guard.found) == ["weight"]
    assert torch.equal(model.weight, before[0])
    assert torch.equal(model.offset, before[1])
