"""The training judge: what is the row's own fault, what is compared, and what a trajectory sees."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from families.controls import training_natives as natives
from families.controls.training_models import WIDTH, Drops, Net, NoisyLater, OtherKernel, SharedHead, _noise, _Planted
from parity.judge import training
from parity.judge.outcome import TRAINING_CHECKS
from parity.judge.train import journey
from parity.judge.train.sides import ArmSide, EagerSide
from parity.rows.family import Subject
from parity.rows.row import Settings
from parity.rows.training import Training, TrainSubject

from .training_rows import catalogue_of, draw, failed, near, of, outcome_of, verdict

pytestmark = pytest.mark.usefixtures("one_thread")
_CALLS = itertools.count()


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_MEMORY", training._Memory())


# ---------------------------------------------------------------- the row's own fault
class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class OneMoreEachTime(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = super().forward(x)
        return (out, out.detach().mean()) if next(_CALLS) % 4 == 0 else (out,)


class Raises(Net):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("no forward today")


class RaisesLater(Net):
    """When it sees the second batch."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            raise ArithmeticError("no batch of five")
        out: Tensor = super().forward(x)
        return out


def two_numbers(forward: Callable[..., Any], x: Any, y: Any) -> Any:
    return (forward(x) - y).square().mean(0)[:2]


def a_float(forward: Callable[..., Any], x: Any, y: Any) -> Any:
    return near(forward, x, y).item()


def detached(forward: Callable[..., Any], x: Any, y: Any) -> Any:
    return near(forward, x, y).detach()


def twice(forward: Callable[..., Any], x: Any, y: Any) -> Any:
    return near(forward, x, y) + near(forward, x, y)


@pytest.mark.parametrize(
    ("kind", "loss", "message"),
    [
        (Net, two_numbers, r"the loss is a torch\.float32 tensor of shape \(2,\), where a scalar is needed: reduce it, by mean\(\)"),
        (Net, a_float, "the loss is a float, where a scalar is needed"),
        (Net, detached, "the loss has no gradient: it is detached, or depends on no trainable parameter"),
        (Net, twice, "the loss called the network 2 times, where a step calls it once"),
        (OneMoreEachTime, near, "the network's outputs change structure"),
        (Raises, near, "the eager training step raised ArithmeticError: no forward today"),
        (RaisesLater, near, "the eager trajectory raised ArithmeticError: no batch of five"),
    ],
)
def test_a_fault_of_the_row_is_told(kind: type[nn.Module], loss: Callable[..., Any], message: str) -> None:
    outcome = outcome_of(of(kind, loss))
    assert outcome.status == "broken"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.message)
    assert verdict(outcome).verdict == "crashed"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda settings: Subject(Net(), Net()), "build() returned a Net, not a TrainSubject around a torch.nn.Module"),
        (lambda settings: Net(), "build() returned a Net, not a TrainSubject"),
    ],
)
def test_a_builder_that_returns_something_else(build: Any, message: str) -> None:
    outcome = outcome_of(catalogue_of(build))
    assert outcome.status == "broken"
    assert message in outcome.message


def test_a_batch_that_is_no_tuple() -> None:
    outcome = outcome_of(of(Net, draw=lambda settings, probe, seed: [1, 2]))
    assert "draw(settings, probe, seed) must return one batch as a tuple, not a list" in outcome.message


def test_two_builds_that_are_not_alike() -> None:
    def build(settings: Settings) -> TrainSubject:
        module = Net()
        module.mix.weight.data += next(_CALLS)
        return TrainSubject(module.train(), module, near)

    outcome = outcome_of(catalogue_of(build))
    assert "two builds with seed 0 differ in mix.weight" in outcome.message


def no_use(forward: Callable[..., Any], x: Any, y: Any) -> Any:
    return (forward(x) * 0.0).mean()


def constant(settings: Settings, probe: str, seed: int) -> tuple[Any, ...]:
    return draw(settings, "A", seed)


@pytest.mark.parametrize(
    ("kind", "loss", "batches", "detail"),
    [
        (Frozen, near, draw, "the module has no trainable parameter: there is nothing to train"),
        (Net, lambda f, x, y: near(f, x, y) * float("nan"), draw, "the loss is nan in eager already"),
        (Net, lambda f, x, y: near(f, x, y) * float("inf"), draw, "the loss is inf in eager already"),
        (Net, no_use, draw, "every gradient is zero"),
        (Net, near, constant, "neither the loss nor an output differs between batches A and B"),
    ],
)
def test_a_step_that_proves_nothing_is_vacuous(kind: Any, loss: Any, batches: Any, detail: str) -> None:
    outcome = outcome_of(of(kind, loss, draw=batches))
    found = verdict(outcome)
    assert (found.verdict, found.cause, found.check, found.detail) == ("vacuous", "dead-input", "eager_step", detail)
    assert [c.status for c in outcome.checks[1:]] == ["skipped"] * (len(TRAINING_CHECKS) - 1)


@pytest.mark.parametrize("error", [MemoryError("none left"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")])
def test_short_memory_is_told_with_its_phase_and_the_next_row_is_judged(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = of(Net)

    def runs(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(EagerSide, "runs", runs)
        outcome = outcome_of(rows)
    assert outcome.status == "out_of_memory"
    assert outcome.message.endswith(f"out of memory during the eager quorum: {error}")
    assert verdict(outcome_of(rows)).safe


def test_a_family_that_is_not_available_is_not_built() -> None:
    outcome = outcome_of(of(Raises, unavailable="needs a key"))
    assert (outcome.status, outcome.message) == ("unavailable", "needs a key")


def test_an_arm_that_is_declared_and_not_there() -> None:
    assert "its TrainSubject has none" in outcome_of(of(Net), "native").message


# ---------------------------------------------------------------- what is compared
def test_what_a_safe_row_says() -> None:
    outcome = outcome_of(of(Net, accumulate=2))
    assert [c.name for c in outcome.checks] == list(TRAINING_CHECKS)
    assert {c.status for c in outcome.checks} == {"passed"}
    told = outcome.training
    assert (told["class"], told["proof"], told["cause"], told["max_ulp"], told["worst"]) == ("exact", [], "", 0, "")
    assert told["tensors"] == [0, 6]
    assert told["sorting"] == {"exact": 2 * (1 + 1 + 3 + 6), "inside_set": 0, "inside_spread": 0, "outside": 0}
    assert told["quorum"] == {"runs": 4, "varying": 0}
    assert told["trajectory"]["steps"] == 6
    assert told["trajectory"]["replayed"] >= 4
    assert told["trajectory"]["finite"]
    assert outcome.captures > 0
    assert outcome.replays > 0
    assert type(outcome).from_dict(outcome.to_dict()) == outcome


def test_eager_is_run_once_for_all_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = of(Net, native=natives.Manager)
    first = outcome_of(rows)
    monkeypatch.setattr("parity.judge.train.sides.run_steps", _only_for_arms)
    again = outcome_of(rows, "bare")
    assert (first.training["class"], again.training["class"]) == ("exact", "exact")


def _only_for_arms(bench: Any, subject: Any, call: Any, **more: Any) -> Any:
    from parity.judge.train.step import run_steps

    assert call is not subject.network, "an eager run that had been done before"
    return run_steps(bench, subject, call, **more)


def test_the_generator_drawn_twice_is_wrong_beside_dropout_too() -> None:
    found = verdict(outcome_of(of(Drops, native=natives.DrawsTwice), "native"))
    assert (found.verdict, found.check, found.cause) == ("wrong", "rng", "rng")


class Frozenmask(natives.Manager):
    """Draws at its capture, and never again."""

    def run(self, x: Tensor) -> list[Tensor]:
        if not hasattr(self, "mask"):
            self.mask = torch.rand(4, device=x.device) > 0.3
        return [super().run(x)[0] * self.mask]


def test_a_mask_drawn_once_is_no_stream_of_its_own() -> None:
    class Masked(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out if self.plain else out * (torch.rand(4, device=x.device) > 0.3)

        plain = False

    class Manager(Frozenmask):
        def __call__(self, x: Tensor) -> Any:
            self.network.plain = True  # type: ignore[assignment]
            try:
                return super().__call__(x)
            finally:
                self.network.plain = False  # type: ignore[assignment]

    assert not verdict(outcome_of(of(Masked, native=Manager), "native")).safe


def test_a_second_signature_is_run_eagerly_and_counted() -> None:
    outcome = outcome_of(of(Net, native=natives.Manager), "native")
    told = outcome.training["trajectory"]
    assert told["forwards"] == 8
    assert told["replayed"] == 7  # all but the odd batch: this manager keeps its graph over a change


def test_a_manager_that_raises_in_the_middle_of_a_run_is_wrong() -> None:
    class Strict(natives.Manager):
        def __call__(self, x: Tensor) -> Any:
            if self.graphs and self.x.shape != x.shape:
                raise ValueError("no other shape")
            return super().__call__(x)

    found = verdict(outcome_of(of(Net, native=Strict), "native"))
    assert (found.verdict, found.check) == ("wrong", "trajectory")
    assert "no other shape" in found.detail


def test_the_first_walk_of_a_process_is_not_kept() -> None:
    """What runs otherwise the first time it meets a shape is no arm's fault: TorchScript is like that on a GPU."""
    met: set[int] = set()

    class Compiles(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            if len(x) not in met:
                met.add(len(x))
                return out * (1 + 2.0**-10)
            return out

    outcome = outcome_of(of(Compiles))
    assert outcome.training["class"] == "exact", outcome
    assert met == {6, 5}


def test_a_switch_in_the_middle_of_a_run() -> None:
    class Branch(Net):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out * 2 if self.late else out

    def build(settings: Settings) -> TrainSubject:
        module = Branch().train()
        return TrainSubject(module, module, near, native=lambda: natives.Manager(module), switch=lambda: setattr(module, "late", True))

    rows = catalogue_of(build)
    assert verdict(outcome_of(rows)).safe  # ours is told by invalidate()
    outcome = outcome_of(rows, "native")  # this manager is not
    assert failed(outcome) == ["trajectory"]


def test_what_was_tried_is_what_the_network_was_given() -> None:
    """A runtime sees the arguments of the network, and no target."""
    outcome = outcome_of(of(Net))
    assert [(p["probe"], p["shape"], p["dtype"]) for p in outcome.probes] == [
        ("A", [6, WIDTH], "float32"),
        ("B", [6, WIDTH], "float32"),
    ]


def test_noise_that_weights_bring_out_when_they_move_is_quieted_for_the_trajectory() -> None:
    outcome = outcome_of(of(NoisyLater))
    assert verdict(outcome).safe, outcome
    assert outcome.training["proof"] == []
    assert outcome.training["trajectory"]["conditions"] == ["deterministic-algorithms"]
    assert any("eager walks another way each time" in note for note in outcome.notes)


def test_noise_that_eager_does_not_show_in_two_walks_is_quieted_as_well() -> None:
    class Lucky(NoisyLater):
        def factor(self) -> float:
            quiet = torch.cuda.is_current_stream_capturing() or torch.equal(self.head.weight, self.first)
            return 1.0 if quiet or torch.are_deterministic_algorithms_enabled() else 1.0 + 2.0**-4

    outcome = outcome_of(of(Lucky))
    assert verdict(outcome).safe, outcome
    assert outcome.training["trajectory"]["conditions"] == ["deterministic-algorithms"]
    assert any("which walks the same way twice" in note for note in outcome.notes)


def test_an_arm_that_fails_under_what_quiets_all_stays_what_it_was() -> None:
    class Lucky(NoisyLater):
        def factor(self) -> float:
            capturing = torch.cuda.is_current_stream_capturing()
            if capturing and torch.are_deterministic_algorithms_enabled():
                raise RuntimeError("no deterministic kernel can be captured")
            return 1.0 if capturing or torch.equal(self.head.weight, self.first) else 1.0 + 2.0**-4

    outcome = outcome_of(of(Lucky), "bare")
    found = verdict(outcome)
    assert (found.verdict, found.check) == ("wrong", "trajectory"), found
    assert any("under deterministic-algorithms the arm fails" in note for note in outcome.notes)


def test_noise_and_a_casts_cache_are_proved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that quiet eager are found on eager alone: the arm is captured once without any, and once under what is found."""

    calls = itertools.count()

    def noise() -> float:  # enough for bfloat16 to see
        return 1.0 if torch.are_deterministic_algorithms_enabled() else 1.0 + 2.0**-4 * (next(calls) % 3)

    class Both(SharedHead):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            first, *rest = super().forward(x)
            return _Planted.apply(first, noise), *rest

    def all_near(forward: Callable[..., Any], x: Tensor, y: Tensor) -> Any:
        return sum((i + 1) * (out.float() - y).square().mean() for i, out in enumerate(forward(x)))

    captured: list[tuple[str, ...]] = []
    capture = ArmSide.capture
    monkeypatch.setattr(ArmSide, "capture", lambda side, settings=(): (captured.append(settings), capture(side, settings))[1])
    outcome = outcome_of(of(Both, all_near, dtypes=("bfloat16",)), "bare")
    assert verdict(outcome).safe, outcome
    told = outcome.training
    assert told["class"] == "eager_noise"
    assert told["proof"] == ["autocast-cache-off", "deterministic-algorithms"]
    assert captured == [(), ("deterministic-algorithms",)]
    assert all(trial["differing"] for trial in told["tried"][:-1])


def test_noise_over_several_steps_that_nothing_quiets_is_unproven() -> None:
    class Incurable(NoisyLater):
        def factor(self) -> float:
            capturing = torch.cuda.is_current_stream_capturing()
            return 1.0 if capturing or torch.equal(self.head.weight, self.first) else _noise()

    found = verdict(outcome_of(of(Incurable)))
    assert (found.verdict, found.check) == ("unproven", "proof")
    assert "over several steps eager differs from itself under deterministic-algorithms" in found.detail


def test_other_sizes_take_part_where_there_are_some() -> None:
    seen = set()

    def sized(settings: Settings, probe: str, seed: int) -> tuple[Any, ...]:
        seen.add((settings.size, settings.batch))
        return torch.ones(settings.batch, settings.size).cumsum(1) * (1 + "AB".index(probe)), torch.rand(settings.batch, 4)

    class AnyWidth(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(nn.functional.adaptive_avg_pool1d(x[:, None], 6)[:, 0] + x[:, :1].cumsum(0))

    outcome = outcome_of(of(AnyWidth, draw=sized, size=8, other_size=10))
    assert verdict(outcome).safe, outcome
    assert seen == {(8, 6), (8, 5), (10, 6)}


def test_the_declared_defaults_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Training("zoo", "family", "training", lambda s: TrainSubject(m := Net().train(), m, near), draw)
    assert (family.batch, family.accumulate, family.dtypes) == (2, 2, ("float16", "bfloat16", "float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    outcome = outcome_of(of(Drops, dtypes=(dtype,), accumulate=2))
    assert outcome.training["class"] == "exact", outcome
    assert outcome.training["trajectory"]["finite"]


# ---------------------------------------------------------------- torch's bare capture
class Scaled(Net):
    """Takes a number beside its tensor, and returns a dict with words in it."""

    def forward(self, x: Tensor, factor: float = 1.0) -> dict[str, Any]:
        return {"out": super().forward(x) * factor, "unit": "px", "none": None}


def scaled(forward: Callable[..., Any], x: Any, y: Any, factor: float) -> Any:
    return (forward(x, factor=factor)["out"] - y).square().mean()


def with_factor(*factors: float) -> Callable[..., Any]:
    return lambda settings, probe, seed: (*draw(settings, probe, seed), factors["AB".index(probe)])


def test_bare_takes_any_arguments_and_outputs() -> None:
    assert outcome_of(of(Scaled, scaled, draw=with_factor(2.0, 2.0)), "bare").training["class"] == "exact"


def test_a_number_frozen_at_capture_is_found_and_named_with_its_line() -> None:
    found = verdict(outcome_of(of(Scaled, scaled, draw=with_factor(2.0, 3.0)), "bare"))
    assert (found.verdict, found.cause) == ("wrong", "stale-constant")
    assert "test_training.py" in found.where


class CountsSteps(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = super().forward(x)
        return out * self.calls


def test_a_counter_of_steps_is_named() -> None:
    found = verdict(outcome_of(of(CountsSteps), "bare"))
    assert (found.verdict, found.cause) == ("wrong", "python-counter")
    assert "calls" in found.detail


class FeedsBack(Net):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        mixed = out if self.last is None else out * 0.5 + self.last * 0.5
        self.last = mixed.detach()
        return mixed


def test_state_beside_the_buffers_is_never_taken_for_noise() -> None:
    for arm in ("bare", "graphed"):
        found = verdict(outcome_of(of(FeedsBack), arm))
        assert not found.safe, (arm, found)
        assert found.verdict != "unproven", (arm, found)


class Decides(Net):
    """A whole number among its outputs depends on the last bit of a gradient that came before."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out: Tensor = super().forward(x)
        return out, out.detach().argmax(1)


def test_a_whole_number_that_differs_has_no_ulps() -> None:
    class Shifted(natives.Manager):
        def replay(self, x: Tensor) -> list[Tensor]:
            first, second = super().replay(x)
            return [first, second + 1]

    outcome = outcome_of(of(Decides, native=Shifted), "native")
    assert failed(outcome) == ["outputs"]
    assert (outcome.training["max_ulp"], outcome.training["worst"]) == (-1, "output [1]")


def test_a_context_is_around_both_arms() -> None:
    def context(device: Any) -> Any:
        return torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False)

    assert outcome_of(of(Net, context=context), "bare").training["class"] == "exact"
    ours = verdict(outcome_of(of(Net, context=context)))  # its backward would run inside the autocast, which it never replays
    assert (ours.verdict, ours.cause) == ("not_graphed", "host-state")
    assert "or only one inside autocast" in ours.detail
    refused = verdict(outcome_of(of(Net, context=lambda device: torch.autocast("cuda", dtype=torch.bfloat16)), "bare"))
    assert (refused.verdict, refused.cause) == ("uncapturable", "autocast-cache")


def test_a_build_that_differs_from_that_of_an_earlier_arm() -> None:
    built = []

    def build(settings: Settings) -> TrainSubject:
        module = Net()
        built.append(module)
        if len(built) > 2:  # eager's and the first arm's are alike
            module.mix.weight.data += 1
        return TrainSubject(module.train(), module, near)

    rows = catalogue_of(build)
    assert verdict(outcome_of(rows)).safe
    assert "is not deterministic" in outcome_of(rows, "bare").message


def test_graphs_of_earlier_conditions_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    capture = ArmSide.capture

    def watched(self: ArmSide, settings: tuple[str, ...] = ()) -> Any:
        made = capture(self, settings)
        held.append((settings, len(self.watch.graphs)))
        return made

    monkeypatch.setattr(ArmSide, "capture", watched)
    assert outcome_of(of(OtherKernel)).training["class"] == "float_rounding"
    assert len({settings for settings, _ in held}) > 1
    assert {graphs for _, graphs in held} == {2}


# ---------------------------------------------------------------- what an outsider's model does
class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mix(x)
        return out


def test_a_lazy_parameter_is_named() -> None:
    outcome = outcome_of(of(Lazy))
    assert outcome.status == "broken"
    assert "mix.weight has no shape yet, so that nothing can be compared: let build() call the lazy module once" in outcome.message


def penalty(forward: Callable[..., Any], x: Any, y: Any) -> Any:
    x = x.requires_grad_()
    out = forward(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + slope.square().mean()


def test_a_loss_that_differentiates_is_judged_where_its_difference_is_looked_into() -> None:
    outcome = outcome_of(of(Net, penalty), "bare")
    assert outcome.status == "judged"
    assert verdict(outcome).verdict == "wrong"


class ReplacesABuffer(Net):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        self.mean = self.mean * 0.9 + out.detach().mean(0) * 0.1
        return out - self.mean


def test_what_is_read_after_it_died_is_told_with_its_line_and_holder() -> None:
    found = verdict(outcome_of(of(ReplacesABuffer), "bare"))
    assert (found.verdict, found.cause) == ("wrong", "stale-address")
    assert "self.mean = self.mean * 0.9" in found.where
    assert "held as mean" in found.detail


def test_a_run_that_starts_over_each_time_says_why() -> None:
    found = verdict(outcome_of(of(ReplacesABuffer)))
    assert found.verdict == "not_graphed"
    assert "it starts over time and again: a parameter or buffer moved, was replaced" in found.detail


def test_a_counter_has_its_line() -> None:
    assert "return out * self.calls" in verdict(outcome_of(of(CountsSteps), "bare")).where


class Teacher(Net):
    """Follows the student within its forward, in frozen parameters, which no warm-up puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 4).requires_grad_(False)
        self.student = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.25)
        out: Tensor = super().forward(x)
        return out + self.student(x) - self.teacher(x)


def test_a_parameter_that_the_forward_writes_to_is_named() -> None:
    found = verdict(outcome_of(of(Teacher), "bare"))
    assert (found.verdict, found.cause) == ("wrong", "buffer-drift")
    assert "a forward writes to parameter teacher.weight in place, so that a warm-up moves it, too" in found.detail


class OwnLoss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def handed_out(forward: Callable[..., Any], x: Any, y: Any) -> Any:
    return forward(x)


def test_a_loss_in_the_graphs_own_memory_is_aliased() -> None:
    found = verdict(outcome_of(of(OwnLoss, handed_out), "bare"))
    assert (found.verdict, found.cause, found.check) == ("wrong", "output-aliasing", "trajectory")
    assert "a loss that was handed out is overwritten by a later replay" in found.detail
    assert outcome_of(of(OwnLoss, handed_out)).training["class"] == "exact"


def of_two_shapes(settings: Settings, probe: str, seed: int) -> tuple[Any, ...]:
    x, y = draw(settings, probe, seed)
    return (x, y) if probe == "A" else (x[1:], y[1:])


def test_bare_says_that_it_keeps_one_shape() -> None:
    found = verdict(outcome_of(of(Net, draw=of_two_shapes), "bare"))
    assert found.verdict == "not_graphed"
    assert "a batch of another shape or layout than the captured one runs eagerly in this arm" in found.detail
    assert outcome_of(of(Net, draw=of_two_shapes)).training["class"] == "exact"


class AsksForGradients(Net):
    """Within its forward, of a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out: Tensor = super().forward(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.mean()


def test_a_refusal_of_our_own_is_told_once() -> None:
    found = verdict(outcome_of(of(AsksForGradients)))
    assert (found.verdict, found.cause) == ("uncapturable", "grad-accumulation")
    assert found.detail.startswith("a (6, 6) leaf gets a gradient")
    assert "CaptureRefused" not in found.detail


class OwnKind(nn.Parameter):
    """A parameter of a zoo's own kind."""


class TrainsItsOwnKind(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = OwnKind(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * self.scale


def test_a_refusal_without_a_cause_is_told_once() -> None:
    found = verdict(outcome_of(of(TrainsItsOwnKind)))
    assert (found.verdict, found.cause) == ("uncapturable", "unknown")
    assert found.detail.startswith("a parameter is a OwnKind")
    assert "CaptureRefused" not in found.detail


# ---------------------------------------------------------------- what Python keeps
class KeepsInAContainer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = {"step": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.schedule["step"] += 1
        out: Tensor = super().forward(x)
        return out * (1 + self.schedule["step"] % 3)


class DrawsOnItsOwn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * self.random.random()


class CountsForAll(Net):
    steps: ClassVar = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.steps[0] += 1
        out: Tensor = super().forward(x)
        return out * (1 + self.steps[0] % 3)


@pytest.mark.parametrize(
    ("kind", "place"),
    [(KeepsInAContainer, "schedule['step']"), (DrawsOnItsOwn, "random"), (CountsForAll, "class CountsForAll.steps[0]")],
)
def test_what_python_keeps_is_no_noise_of_eager(kind: type[nn.Module], place: str) -> None:
    """It is put back before each run, so that eager agrees with itself, and named."""
    rows = of(kind)
    for arm, word in (("graphed", "uncapturable"), ("bare", "wrong")):
        outcome = outcome_of(rows, arm)
        found = verdict(outcome)
        assert (found.verdict, found.cause) == (word, "python-counter")
        assert f"step changes {place} of the module" in found.detail
        if arm == "bare":
            assert outcome.training["quorum"]["varying"] == 0


class Tires(natives.Manager):
    """Replays for as long as single steps are judged: one run in which it is captured, three that count."""

    def __call__(self, x: Tensor) -> Any:
        if self.calls >= 8:
            return self.network(x)
        return super().__call__(x)


def test_a_trajectory_without_a_replay_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(of(Net, native=Tires), "native")
    found = verdict(outcome)
    assert (found.verdict, found.check) == ("not_graphed", "capture")
    assert "none of 8 steps in a row was replayed" in found.detail
    assert outcome.training["class"] == ""
    monkeypatch.setattr(journey, "idle", lambda end: False)
    assert verdict(outcome_of(of(Net, native=Tires), "native")).safe


class Grows(Net):
    """Bounded for a step, and not for several."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.factor.mul_(2.0**20)
        out: Tensor = super().forward(x)
        return out * self.factor


def test_a_loss_that_overflows_on_the_way_is_noted() -> None:
    outcome = outcome_of(of(Grows, lambda forward, x, y: forward(x).mean()))
    assert outcome.training["class"] == "exact"
    assert outcome.training["trajectory"]["finite"] is False
    assert "over several steps the loss stops being finite: equal bits say little from there on" in outcome.notes
