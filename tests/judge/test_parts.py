"""The judge's small parts: the census of kernels, poison, scaled weights, counted captures, sensitised weights, diagnoses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parity.judge import bits, census, stale
from parity.judge.diagnose import diagnose
from parity.judge.records import scale
from parity.judge.script import INFERENCE, SEQUENCE
from parity.judge.subject import Bench, apart, sensitize, state
from parity.judge.verdict import verdict_of
from parity.judge.watch import Watch, live_tensors
from parity.rows.family import Family
from parity.rows.row import Row
from parity.runtime import cudart
from parity.runtime.engine import Engine, engine

from .judging import ENGINE, Scale, catalogue_of, inputs, outcome_of, subject


@pytest.fixture
def emulated(one_thread: None) -> Iterator[Engine]:
    driver = engine("emulated")
    with driver.entered(), torch.no_grad():
        yield driver


# ---- the script


def test_the_sequence_is_the_protocols() -> None:
    assert [s.probe for s in SEQUENCE] == ["A", "B", "A", "A", "B"]
    assert INFERENCE[: len(SEQUENCE)] == SEQUENCE
    assert all(s.probe in ("A", "B") for s in INFERENCE if s.is_call)


def test_every_memory_step_is_followed_by_a_call_of_its_check() -> None:
    for step, after in pairwise(INFERENCE):
        if not step.is_call:
            assert after.is_call
            assert after.check == step.check


# ---- census


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, 3>(int, float)",
            "native::vectorized_elementwise_kernel",
        ),
        ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
        ("sm90_xmma_gemm_f32f32", "sm90_xmma_gemm_f32f32"),
        ("", ""),
    ],
)
def test_a_kernel_is_called_by_its_last_two_scopes(name: str, short: str) -> None:
    assert census.short(name) == short


def test_the_captures_own_fills_are_no_culprits_and_others_are() -> None:
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>, 1>(int)"
    assert census.culprits([fill]) == []
    assert census.culprits([fill, "void deform<float>(int)", "void deform<float>(int)"]) == ["deform"]


def test_tallies_apart() -> None:
    eager, graph = census.tally(["a(int)", "b", "a(int)"]), census.tally(["a", "c"])
    assert eager == {"a": 2, "b": 1}
    assert census.apart(eager, graph) == {"a": [2, 1], "b": [1, 0], "c": [0, 1]}
    assert census.apart(eager, eager) == {}


# ---- poison


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=8),
    st.sampled_from([torch.uint8, torch.int64, torch.bool, torch.float32, torch.complex64]),
)
def test_scrambled_values_stay_legal_as_indices(values: list[int], dtype: torch.dtype) -> None:
    content = torch.tensor(values).to(dtype)
    other = stale.scrambled(content)
    assert other.dtype == content.dtype
    if dtype.is_floating_point or dtype.is_complex:
        assert bool(other.isnan().all())
    elif dtype is torch.bool:
        assert bool((other != content).all())
    else:
        assert content.min() <= other.min()
        assert other.max() <= content.max()
        assert torch.equal(other, content) == (len({*content.tolist()}) == 1 or content.tolist() == other.tolist())


def test_poison_fills_whole_storages_once() -> None:
    whole = torch.zeros(8)
    count = stale.poison([whole[2:4], whole[:1], torch.zeros(0)])
    assert count == 1
    assert bool(whole.isnan().all())
    assert set(whole.view(torch.uint8).tolist()) == {stale.SIGNAL}


# ---- weights


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("variance", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.ones((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


def test_floats_on_the_device_are_scaled_and_everything_else_is_listed(emulated: Engine) -> None:
    module = Mixed().to("cuda")
    module.register_buffer("host", torch.ones(2, device="cpu"))
    scaled, left = scale(module)
    assert (scaled, sorted(left)) == (2, ["count", "host", "mask"])
    with emulated.quiet():
        for tensor in (module.weight, module.variance):
            assert bool(((tensor >= 0.9) & (tensor <= 1.1) & (tensor != 1)).all())
        assert module.weight[0] != module.variance[0]  # a factor of its own for every name
        again = Mixed()
    again.to("cuda")
    scale(again)
    assert bits.same(again.weight, module.weight)


def test_builds_are_told_apart() -> None:
    one, other = state(Mixed()), state(Mixed())
    assert apart(one, other) is None
    other["variance"] = torch.tensor([1.0, -1.0])
    assert apart(one, other) == "variance"
    other["variance"] = torch.ones(3)
    assert apart(one, other) == "variance"
    del other["mask"]
    assert "mask" in str(apart(one, other))


def test_constant_weights_are_drawn_anew_and_statistics_calibrated() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    module[1].momentum = 0.3
    nn.init.zeros_(module[2].weight)
    before = {n: t.clone() for n, t in state(module).items()}
    patch = sensitize(module, module, [(torch.randn(8, 4),), (torch.randn(8, 4) + 3,)], 0)
    assert set(patch) == {"1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight"}
    assert bits.same(module[0].weight, before["0.weight"])
    assert (module[1].momentum, module[1].training) == (0.3, False)
    assert bool((patch["2.weight"] != 0).all())
    untouched = nn.Linear(4, 2)
    assert sensitize(untouched, untouched, [], 0) == {}


# ---- what was captured


def test_captures_and_replays_are_counted_at_torchs_own_graph(emulated: Engine) -> None:
    watch = Watch()
    x = torch.ones(2, device="cuda")
    plain = torch.cuda.CUDAGraph.replay
    with watch.entered():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x + 1
        assert (watch.captures, watch.replays) == (1, 0)
        graph.replay()
        graph.replay()
        assert (watch.captures, watch.replays) == (1, 2)
    assert torch.cuda.CUDAGraph.replay is plain
    graph.replay()
    assert watch.replays == 2
    assert watch.graphs == [graph]


def test_what_the_runtime_launches_by_number_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    runtime = SimpleNamespace(launch=lambda executable, stream: order.append((executable, stream)) or 700)
    plain = runtime.launch
    monkeypatch.setattr(cudart, "loaded", lambda: runtime)
    watch = Watch()
    with watch.entered():
        watch.around_replay = lambda: bracketed(order)
        assert runtime.launch(5, 7) == 700  # the code goes through
    assert watch.replays == 1
    assert order == ["before", (5, 7), "behind"]
    assert runtime.launch is plain


@contextmanager
def bracketed(order: list[Any]) -> Iterator[None]:
    order.append("before")
    yield
    order.append("behind")


def test_live_tensors_are_found_and_dead_ones_are_not() -> None:
    held = {"deep": [torch.zeros(1)]}
    assert any(t is held["deep"][0] for t in live_tensors())
    key = id(held.pop("deep")[0])
    assert not any(id(t) == key for t in live_tensors())


# ---- causes


def _bench(forward: Any, driver: Engine) -> Bench:
    class Model(Scale):
        calls = 0
        last: Any = None

        def forward(self, x: torch.Tensor) -> Any:
            return forward(self, x)

    return Bench(Row("z", "f", "t"), Family("z", "f", "t", lambda _: subject(Model()), inputs), driver, 0)


def _counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * self.calls


def _feeds_back(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x if self.last is None else x + self.last
    self.last = y
    return y


def _replaces(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x if self.last is None else x + self.last
    self.last = x * 2
    return y


@pytest.mark.parametrize(
    ("forward", "cause"),
    [
        (_counts, "python-counter"),
        (lambda self, x: x * 2 if float(x[0, 0]) > 0.5 else x + 1, "python-branch"),
        (lambda self, x: x * float(x[0, 0]), "stale-constant"),
        (_feeds_back, "output-aliasing"),
        (_replaces, "stale-address"),
        (lambda self, x: x * self.weight, "unknown"),
    ],
)
def test_a_cause_by_experiment(forward: Any, cause: str, emulated: Engine) -> None:
    bench = _bench(forward, emulated)
    a, b = (bench.args(p)[0].tolist()[0][0] for p in ("A", "B"))
    assert (a > 0.5) != (b > 0.5), "the probes must fall on either side of the branch"
    finding = diagnose(bench)
    assert finding.cause == cause
    assert ("test_parts.py:" in finding.where) == (cause != "unknown")


class Gained(Scale):
    """A factor in Python that only ``between`` moves."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.gain


def _raise_gain(module: Any) -> None:
    module.gain += 0.5


@pytest.mark.parametrize(("between", "wanted"), [(_raise_gain, ("wrong", "stale-constant")), (None, ("screened", ""))])
def test_what_between_changed_in_python_is_a_stale_constant(fresh: None, between: Any, wanted: tuple[str, str]) -> None:
    found = verdict_of(outcome_of(catalogue_of(lambda settings: subject(Gained()), between=between)), ENGINE)
    assert (found.verdict, found.cause) == wanted


def test_only_what_the_model_holds_is_poisoned_or_escapes(fresh: None) -> None:
    """A tape holds a tensor for every operation; taking those for outputs would poison, and scramble, what no model can see."""
    checks = {c.name: c for c in outcome_of(catalogue_of(lambda settings: subject(Scale())), "graphed").checks}
    assert checks["poison"].figures["storages"] == 1
    assert checks["escape"].figures["escaped"] == []
