"""Training controls: for each class and each cause a small network that must get exactly it, and for each check a sabotage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from parity.rows.family import Expect
from parity.rows.row import Settings
from parity.rows.training import Training, TrainSubject

BATCH: Final = 6
_WIDTH: Final = 6


def draw(settings: Settings, probe: str, seed: int) -> tuple[Any, ...]:
    """A matrix, and one to be near to."""
    import torch

    generator = torch.Generator().manual_seed(2 * seed + "AB".index(probe))
    x = torch.randn(settings.batch, _WIDTH, generator=generator)
    return x * (1.0 if probe == "A" else 2.0), torch.rand(settings.batch, 4, generator=generator)


def near(forward: Callable[..., Any], module: Any, x: Any, y: Any) -> Any:
    """Of several outputs, the first one counts."""
    out = forward(x)
    out = out[0] if isinstance(out, tuple) else out
    return (out.float().flatten(1)[:, :4] - y).square().mean()


def all_near(forward: Callable[..., Any], module: Any, x: Any, y: Any) -> Any:
    outs = forward(x)
    return sum((i + 1) * (out.float() - y).square().mean() for i, out in enumerate(outs))


def with_term(forward: Callable[..., Any], module: Any, x: Any, y: Any) -> Any:
    return near(forward, module, x, y) + module.term


def with_an_island(forward: Callable[..., Any], module: Any, x: Any, y: Any) -> Any:
    """A product in single precision within autocast, whose backward runs outside of it, whatever the network's does."""
    import torch

    out = forward(x).float()
    with torch.autocast("cuda", enabled=False):
        return (out @ torch.tanh(out.t()) - y @ y.t()).square().mean()


def with_transposed(forward: Callable[..., Any], module: Any, x: Any, y: Any) -> Any:
    out, offset = forward(x)
    return (out - y).square().mean() + (offset.t() * y[:4]).sum()


def _builder(model: str, native: str, loss: Callable[..., Any]) -> Callable[[Settings], TrainSubject]:
    def build(settings: Settings) -> TrainSubject:
        from . import training_models, training_natives

        module = getattr(training_models, model)().train()
        made: Any = None if not native else lambda: getattr(training_natives, native)(module)
        return TrainSubject(module, module, lambda forward, x, y: loss(forward, module, x, y), native=made)

    return build


PROOFS: Final[Mapping[tuple[str, str], tuple[str, str, tuple[str, ...]]]] = {
    # (control, arm): (class, cause, proof), where that is not ("exact", "", ()); of both engines
    ("leaves_the_generator", "native"): ("exact", "rng", ("rng-aligned",)),
    ("draws_from_its_own_stream", "native"): ("own_rng", "rng", ("draws-fixed",)),
    ("layout_by_one_ulp", "bare"): ("one_ulp", "grad-layout", ("incoming-layout-of-outputs",)),
    ("layout_by_many_ulp", "bare"): ("float_rounding", "grad-layout", ("incoming-layout-of-outputs",)),
    ("shares_a_weight_in_autocast", "bare"): ("float_rounding", "autocast-cache", ("autocast-cache-off",)),
    ("shares_a_weight_at_rest", "bare"): ("float_rounding", "autocast-cache", ("autocast-cache-off",)),
    ("island_in_autocast", "bare"): ("float_rounding", "autocast-backward", ("backward-inside-autocast",)),
    ("islands_on_both_sides", "bare"): ("float_rounding", "autocast-backward", ("backward-inside-autocast",)),
    **{
        ("another_kernel_while_captured", arm): ("float_rounding", "reduction-order", ("deterministic-algorithms",))
        for arm in ("bare", "graphed")
    },
    **{
        ("noise_with_a_cure", arm): ("eager_noise", "nondeterministic-kernel", ("deterministic-algorithms",))
        for arm in ("bare", "graphed")
    },
}


def _control(
    name: str,
    model: str = "Net",
    *,
    native: str = "",
    loss: Callable[..., Any] = near,
    dtype: str = "float32",
    accumulate: int = 1,
    expect: Mapping[str, Expect] | None = None,
) -> Training:
    """``expect``: arm to what is declared of it. ``accumulate``: one batch where the arm is torch's bare capture, whose gradients of
    two batches do not add up."""
    arms = ("native",) if native else ("bare", "graphed")
    return Training(
        "controls",
        name,
        "training",
        _builder(model, native, loss),
        draw,
        batch=BATCH,
        dtypes=(dtype,),
        arms=arms,
        seam="a network of two layers",
        accumulate=accumulate,
        expected={arm: (one,) for arm, one in (expect or {}).items()},
        classes={} if expect else {arm: PROOFS.get((name, arm), ("exact", "", ()))[:2] for arm in arms},
    )


def _sabotaged(name: str, native: str, check: str, cause: str, reason: str, model: str = "Net", **more: Any) -> Training:
    verdict = "not_graphed" if check == "capture" else "wrong"
    return _control(name, model, native=native, accumulate=2, expect={"native": Expect(verdict, reason, cause, check=check)}, **more)


def _both(expect: Expect) -> dict[str, Expect]:
    return {"bare": expect, "graphed": expect}


SABOTAGED: Final = (
    _control("trains_to_nan", "BecomesNan",
             expect=_both(Expect("vacuous", "the loss is NaN in eager, and any two NaN are alike", "dead-input", check="eager_step"))),
    _control("reads_a_value_in_training", "ReadsAValue",
             expect=_both(Expect("uncapturable", "branches on a value that the host must read", "host-sync", check="capture"))),
    _sabotaged("trains_eagerly_in_secret", "RunsEagerly", "capture", "host-state", "claims to be ready and only calls the network"),
    _sabotaged("forgets_a_term_of_the_loss", "ForgetsTheTerm", "loss", "host-state",
               "part of the loss is read from the module, where no replay renews it", "LeavesATerm", loss=with_term),
    _sabotaged("keeps_an_output", "KeepsAnOutput", "outputs", "stale-constant",
               "hands out for every batch what one output was for the first", "Reports"),
    _sabotaged("updates_a_copy_of_its_buffers", "UpdatesACopy", "buffers", "buffer-drift",
               "running statistics are written where the module does not look"),
    _sabotaged("leaves_its_warm_up", "LeavesWarmUp", "buffers", "buffer-drift",
               "warm-up has moved the running statistics when the first graphed step begins"),
    _sabotaged("drops_a_gradient", "DropsAGradient", "gradients", "host-state", "one parameter is given no gradient"),
    _sabotaged("swaps_two_parameters", "SwapsParameters", "gradients", "output-aliasing",
               "two parameters of one shape are given each other's gradient"),
    _control("gives_zeros_for_nothing", "TwoHeads",
             expect={"bare": Expect("wrong", "an unused head is given zeros, where eager gives no gradient", "dead-input",
                                    check="gradients")}),
    _sabotaged("draws_twice", "DrawsTwice", "rng", "rng", "each step moves the generator once more than eager's does"),
    _sabotaged("lends_its_gradients", "LendsItsGradients", "accumulation", "grad-accumulation",
               "what the first batch left is overwritten by the second, and added to itself"),
    _control("noise_without_a_cure", "IncurablyNoisy",
             expect=_both(Expect("unproven", "differs from run to run whatever is asked of torch", "nondeterministic-kernel",
                                 check="proof"))),
    _sabotaged("copies_its_weights", "CopiesWeights", "trajectory", "stale-constant",
               "replays on a copy of the weights, which no optimizer moves"),
)  # fmt: skip

PROVED: Final = (
    _control("trains_plainly"),
    _control("trains_plainly_in_bfloat16", dtype="bfloat16"),
    _control("trains_by_a_sound_manager", native="Manager", accumulate=2),
    _control("trains_with_dropout", "Drops"),
    _control("leaves_the_generator", "Drops", native="LeavesTheGenerator", accumulate=2),
    _control("draws_from_its_own_stream", "Masks", native="DrawsFromItsOwn", accumulate=2),
    _control("layout_by_one_ulp", "MindsLayout", loss=with_transposed),
    _control("layout_by_many_ulp", "MindsLayoutMuch", loss=with_transposed),
    _control("shares_a_weight_in_autocast", "SharedHead", loss=all_near, dtype="bfloat16"),
    _control("shares_a_weight_at_rest", "SharedHeadAtRest", loss=all_near, dtype="bfloat16"),
    _control("island_in_autocast", "Island", dtype="bfloat16"),
    _control("islands_on_both_sides", "Island", loss=with_an_island, dtype="bfloat16"),
    _control("another_kernel_while_captured", "OtherKernel"),
    _control("noise_with_a_cure", "Noisy"),
    _control("noise_that_comes_later", "NoisyLater"),
    _control("samples_a_grid", "SamplesAGrid"),
)

FAMILIES: Final = (*SABOTAGED, *PROVED)
