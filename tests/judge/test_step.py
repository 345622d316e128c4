"""The parts of one training step: the state it starts from, what a capture does to gradients, and draws that no generator decides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families.controls.training_models import Drops, Net
from parity.judge.bits import bundle
from parity.judge.counterfactual import draws
from parity.judge.counterfactual.conditions import EagerTwist
from parity.judge.counterfactual.draws import FIXED
from parity.judge.train.arms import BareTraining, EagerTraining, GraphedTraining, NativeTraining
from parity.judge.train.seam import Seam, as_static
from parity.judge.train.sides import ALIGNED, settings_of
from parity.judge.train.step import State, TrainBench, mixed, probes, run_steps
from parity.rows.training import TrainSubject
from parity.runtime.emulated import device
from parity.runtime.engine import engine
from parity.runtime.errors import CaptureRefused

from .training_rows import ENGINE, near, of


@pytest.fixture(autouse=True)
def _on_device(one_thread: None) -> Iterator[None]:
    with device():
        yield


def fresh(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().to("cuda").train()


def bench_of(kind: type[nn.Module], **more: Any) -> TrainBench:
    (family,) = of(kind, **more).zoos[0].families
    return TrainBench(family.rows()[0], family, engine(ENGINE), 0)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the state
def test_a_state_brings_everything_back() -> None:
    net = fresh()
    net.steps = 3  # type: ignore[assignment]
    state = State(net)
    values = bundle([*net.named_parameters(), *net.named_buffers()])
    drawn = torch.rand(3, device="cuda"), torch.rand(3), random.random()
    held = net.norm.running_mean  # type: ignore[union-attr]
    net(torch.randn(4, 6).to("cuda")).sum().backward()
    with torch.no_grad():
        net.mix.weight.add_(1)  # type: ignore[union-attr, operator]
    net.norm.running_mean = held + 1  # type: ignore[union-attr, operator]
    net.norm.register_buffer("late", torch.ones(1))
    net.steps = 4  # type: ignore[assignment]
    state.restore()
    assert not values.unlike(bundle([*net.named_parameters(), *net.named_buffers()]))
    assert net.norm.running_mean is held  # type: ignore[union-attr]
    assert (net.steps, {p.grad for p in net.parameters()}) == (3, {None})
    torch.rand(3, device="cuda")
    state.restore()
    again = torch.rand(3, device="cuda"), torch.rand(3), random.random()
    assert torch.equal(again[0], drawn[0])
    assert torch.equal(again[1], drawn[1])
    assert again[2] == drawn[2]


def test_what_was_built_lazily_stays_where_only_values_go_back() -> None:
    net = fresh()
    before = State(net)
    net.norm.register_buffer("late", torch.ones(1))
    net.cached = True  # type: ignore[assignment]
    before.restore(values_only=True)
    assert "norm.late" in dict(net.named_buffers())
    assert net.cached


def test_batches_drawn_late_do_not_move_generators() -> None:
    def careless(settings: Any, probe: str, seed: int) -> tuple[Any, ...]:
        return torch.rand(settings.batch, 6), torch.rand(settings.batch, 4)

    bench = bench_of(Net, draw=careless)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = bench.args("A")
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(bench.args("A")[0], first[0])
    assert bench.args("A")[0] is not first[0]


def test_the_odd_batch_is_one_short_or_two() -> None:
    bench = bench_of(Net)
    assert [len(bench.args("A", v)[0]) for v in ("", "odd")] == [6, 5]
    assert len(bench_of(Net, batch=1).args("A", "odd")[0]) == 2
    assert not bench.variant("size")


@pytest.mark.parametrize(
    ("accumulate", "steps"),
    [
        (1, [("A", True), ("B", True)]),
        (2, [("A", True), ("B", False)]),
        (3, [("A", True), ("B", False), ("A", False)]),
    ],
)
def test_both_probes_take_part_however_many_add_up(accumulate: int, steps: list[tuple[str, bool]]) -> None:
    assert probes(accumulate) == steps


def test_a_run_adds_up_what_it_is_told_to() -> None:
    found = {}
    for accumulate in (1, 2):
        bench = bench_of(Net, accumulate=accumulate)
        subject = bench.build()
        first, second = run_steps(bench, subject, subject.network, cache=True, twist=EagerTwist())
        found[accumulate] = dict(first.gradients.leaves()), dict(second.gradients.leaves())
    key = "gradient head.bias"
    assert torch.equal(found[1][0][key], found[2][0][key])
    assert torch.equal(found[2][1][key], found[1][0][key] + found[1][1][key])


def test_float32_is_no_autocast_at_all() -> None:
    with mixed(torch.float32, True):
        assert not torch.is_autocast_enabled("cuda")
    with mixed(torch.bfloat16, False):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()


# ---------------------------------------------------------------- gradients as a capture gets them
def test_gradients_arrive_laid_out_like_the_outputs() -> None:
    seen: list[tuple[int, ...]] = []
    source = torch.ones(2, 3, device="cuda", requires_grad=True)
    inner = source * 1
    inner.register_hook(lambda grad: seen.append(grad.stride()))
    (inner.t() * torch.ones(3, 2, device="cuda")).sum().backward()
    out = as_static(inner := source * 1)
    inner.register_hook(lambda grad: seen.append(grad.stride()))
    (out.t() * torch.ones(3, 2, device="cuda")).sum().backward()
    assert seen == [(1, 2), (3, 1)]


def test_an_output_that_nobody_uses_gets_zeros_and_others_what_is_theirs() -> None:
    source = torch.ones(2, device="cuda", requires_grad=True)
    seen = []
    used, unused = source * 2, source * 3
    unused.register_hook(lambda grad: seen.append(grad.tolist()))
    out = as_static({"used": used, "unused": unused, "whole": torch.ones(1, device="cuda"), "word": "px"})
    out["used"].mul_(2)  # the loss may write to them
    out["used"].sum().backward()
    assert seen == [[0.0, 0.0]]
    assert torch.equal(source.grad, torch.full((2,), 4.0, device="cuda"))  # type: ignore[arg-type]
    assert out["word"] == "px"
    assert not out["whole"].requires_grad


def test_nothing_to_differentiate_is_passed_on() -> None:
    value = torch.ones(1, device="cuda")
    assert as_static((value, None))[0] is value


def cut(*results: Tensor) -> tuple[Seam, list[Tensor]]:
    seam = Seam()
    return seam, list(seam.cut(list(results)))


def test_the_backward_of_a_loss_ends_where_its_network_begins() -> None:
    source = torch.ones(2, device="cuda", requires_grad=True)
    within: list[bool] = []
    inner = source * 2
    inner.register_hook(lambda grad: within.append(torch.is_autocast_enabled("cuda")))
    seam, (out,) = cut(inner)
    (out.mul_(3).sum() * 5).backward()  # the loss may write to them
    assert source.grad is None
    with torch.autocast("cuda", torch.bfloat16):
        seam.backward()
    assert within == [True]
    assert torch.equal(source.grad, torch.full((2,), 30.0, device="cuda"))  # type: ignore[arg-type]


def test_an_output_that_no_loss_uses_gets_no_gradient_from_a_cut_either() -> None:
    source, other = (torch.ones(2, device="cuda", requires_grad=True) for _ in range(2))
    seam, (used, _) = cut(source * 2, other * 3)
    used.sum().backward()
    seam.backward()
    assert source.grad is not None
    assert other.grad is None


def test_what_has_no_gradient_is_not_cut() -> None:
    value = torch.ones(1, device="cuda")
    seam, (out,) = cut(value)
    assert out is value
    seam.backward()


# ---------------------------------------------------------------- conditions
def test_what_has_to_be_captured_anew() -> None:
    names = (ALIGNED, FIXED, "autocast-cache-off", "deterministic-algorithms")
    assert settings_of(names) == ("deterministic-algorithms", FIXED)
    assert draws.twist(names) == EagerTwist(autocast_cache=False)


def test_fixed_draws_follow_no_generator() -> None:
    def drawn() -> list[Tensor]:
        blank = torch.empty(100, device="cuda")
        dropped = nn.functional.dropout(torch.ones(100, device="cuda"), 0.3)
        return [torch.rand(100, device="cuda"), blank.clone().normal_(2.0, 3.0), blank.clone().bernoulli_(0.3), dropped]

    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    with draws.applied([FIXED]):
        first, second = drawn(), drawn()
    assert all(map(torch.equal, first, second))
    unit, normal, coins, dropped = first
    assert 0 <= float(unit.min()) < 0.05 < 0.95 < float(unit.max()) < 1
    assert float(normal.mean()) == pytest.approx(2.0, abs=0.2)
    assert float(normal.std()) == pytest.approx(3.0, abs=0.3)
    assert float(coins.mean()) == pytest.approx(0.3, abs=0.03)
    assert sorted(set(dropped.tolist())) == [0.0, pytest.approx(1 / 0.7)]
    assert float((dropped == 0).float().mean()) == pytest.approx(0.3, abs=0.03)
    torch.set_rng_state(before[0])
    assert not torch.equal(torch.rand(100, device="cuda"), unit)


# ---------------------------------------------------------------- arms
def subject_of(net: nn.Module) -> TrainSubject:
    return TrainSubject(net, net, near)


def test_bare_leaves_the_network_as_it_was() -> None:
    net = fresh(Drops)
    x = torch.randn(4, 6).to("cuda")
    buffers, generator = bundle(list(net.named_buffers())), torch.cuda.get_rng_state()
    arm = BareTraining(subject_of(net))
    arm._captured((x,), {})
    assert "forward" not in vars(net)
    assert not buffers.unlike(bundle(list(net.named_buffers())))
    assert torch.equal(torch.cuda.get_rng_state(), generator)


def test_another_shape_runs_eagerly_in_bare() -> None:
    net = fresh()
    arm = BareTraining(subject_of(net))
    assert [len(arm(torch.randn(n, 6).to("cuda"))) for n in (4, 3, 4)] == [4, 3, 4]


def test_no_arm_claims_a_refusal_before_it_ran() -> None:
    subject = subject_of(fresh())
    subject.native = lambda: _Silent()
    assert [kind(subject).refusal() for kind in (EagerTraining, BareTraining, GraphedTraining, NativeTraining)] == [None] * 4
    assert not NativeTraining(subject).cache


class _Silent:
    autocast_cache = False

    def __call__(self, *args: Any) -> Any:
        return args[0]

    def ready(self) -> bool:
        return False

    def reason(self) -> str:
        return ""


def test_bare_refuses_an_autocast_that_keeps_its_casts() -> None:
    arm = BareTraining(subject_of(fresh()))
    with torch.autocast("cuda", dtype=torch.bfloat16), pytest.raises(CaptureRefused, match="keeps its casts") as caught:
        arm(torch.randn(4, 6).to("cuda"))
    assert caught.value.cause == "autocast-cache"
