"""Training controls on the emulated engine: each is judged as declared, and every check has a control that it alone catches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from families.controls.training import FAMILIES, PROOFS, PROVED
from parity.judge import training
from parity.judge.bits import bundle
from parity.judge.judging import judge
from parity.judge.outcome import CAUSES, CLASSES, TRAINING_CHECKS
from parity.judge.train import comparison, proving
from parity.judge.train import walk as training_walk
from parity.judge.train.comparison import Comparison
from parity.judge.train.quorum import Varying
from parity.judge.train.sides import ArmSide
from parity.judge.train.step import Left
from parity.judge.train.trajectory import Travelled
from parity.judge.verdict import Verdict, as_expected, verdict_of
from parity.rows.discovery import Catalogue
from parity.rows.row import Row

from .training_rows import ENGINE

ROWS = [row for family in FAMILIES for row in family.rows()]
pytestmark = pytest.mark.usefixtures("one_thread")


def named(name: str, arm: str) -> Row:
    return next(r for r in ROWS if (r.family, r.arm) == (name, arm))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_control_gets_the_verdict_and_the_proof_it_declares(row: Row, controls: Catalogue) -> None:
    outcome = judge(row, controls, ENGINE)
    found = verdict_of(outcome, ENGINE)
    expect = controls.training(row).expectation(row, ENGINE, torch.__version__)
    assert as_expected(found, expect), found
    assert [c.name for c in outcome.checks] == list(TRAINING_CHECKS)
    told = outcome.training
    if expect is None:
        assert found.verdict == "screened"
        assert (told["class"], told["cause"], tuple(told["proof"])) == PROOFS.get((row.family, row.arm), ("exact", "", ()))
        assert told["class"] in CLASSES
        assert told["trajectory"]["differing"] == 0
        assert told["trajectory"]["replayed"] > 0
    else:
        assert (told["class"], found.cause in CAUSES, bool(found.detail)) == ("", True, True)


def test_every_check_has_a_control() -> None:
    declared = {e.check for f in FAMILIES for expects in f.expected.values() for e in expects}
    assert declared == set(TRAINING_CHECKS)


def test_every_class_has_a_control_and_every_cause_of_a_class() -> None:
    proved = {PROOFS.get((r.family, r.arm), ("exact", "", ()))[:2] for f in PROVED for r in f.rows()}
    assert {name for name, _ in proved} == set(CLASSES)
    assert {cause for _, cause in proved} == {
        "", "rng", "grad-layout", "autocast-cache", "autocast-backward", "nondeterministic-kernel", "reduction-order"
    }  # fmt: skip


def test_no_proof_is_declared_for_a_row_that_is_none() -> None:
    assert set(PROOFS) <= {(r.family, r.arm) for r in ROWS}


def test_noise_is_named_with_its_line(controls: Catalogue) -> None:
    (op,) = judge(named("noise_with_a_cure", "bare"), controls, ENGINE).training["ops"]
    assert op.startswith("index_add at families/controls/training_models.py:")


def test_a_row_is_judged_alike_twice_and_in_any_order(controls: Catalogue) -> None:
    rows = [r for r in ROWS if r.family in ("trains_plainly", "trains_with_dropout", "layout_by_one_ulp")]

    def told(row: Row) -> Any:
        outcome = judge(row, controls, ENGINE)
        return outcome.checks, outcome.training

    first = {row.id: told(row) for row in rows}
    assert {row.id: told(row) for row in reversed(rows)} == first


# ---- the judge sabotaged: with one check gone, its control gets away, or is called something else


def trust_eager(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(training_walk.TrainWalk, "_alive", lambda self, run: None)


def trust_the_arm(patch: pytest.MonkeyPatch) -> None:
    """Whatever it replays, or does not."""
    run = ArmSide.run

    def counted(self: ArmSide) -> Any:
        self.watch.captures += 1
        self.watch.replays += 100
        return run(self)

    patch.setattr(ArmSide, "run", counted)
    patch.setattr("parity.judge.train.journey.idle", lambda end: False)


def without(*parts: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Parts of a step that nobody looks at, in one step and over several."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        compared = comparison.compared

        def blind(*runs: Any, **more: Any) -> Comparison:
            result = compared(*runs, **more)
            result.found = [f for f in result.found if f[1] not in parts]
            return result

        patch.setattr(proving, "compared", blind)
        patch.setattr(training_walk, "compared", blind)
        patch.setattr(Travelled, "unlike", lambda self, other: [])

    return sabotage


def without_the_run_that_captures(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ArmSide, "capture", _forgetting(ArmSide.capture))


def _forgetting(capture: Any) -> Any:
    def captured(self: ArmSide, settings: tuple[str, ...] = ()) -> Any:
        arm = capture(self, settings)
        self.at_capture = self.run()
        return arm

    return captured


def one_batch_at_a_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("parity.judge.train.step.probes", lambda accumulate: [("A", True), ("B", True)])
    patch.setattr(training_walk, "probes", lambda accumulate: [("A", True), ("B", True)])
    patch.setattr(Travelled, "unlike", lambda self, other: [])


def trust_noise(patch: pytest.MonkeyPatch) -> None:
    """A difference within eager's noise is taken for none."""
    patch.setattr(training_walk.TrainWalk, "_unproven", lambda self, comparison, found: self._pass_step())
    patch.setattr(Travelled, "unlike", lambda self, other: [])
    step = training_walk.TrainWalk._step
    patch.setattr(training_walk.TrainWalk, "_step", lambda self, runs: step(self, runs) or True)


def trust_trajectories(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Travelled, "unlike", lambda self, other: [])


SABOTAGES: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "eager_step": ("trains_to_nan", "bare", trust_eager),
    "capture": ("trains_eagerly_in_secret", "native", trust_the_arm),
    "loss": ("forgets_a_term_of_the_loss", "native", without("loss")),
    "outputs": ("keeps_an_output", "native", without("outputs")),
    "buffers": ("updates_a_copy_of_its_buffers", "native", without("buffers")),
    "gradients": ("drops_a_gradient", "native", without("gradients")),
    "rng": ("draws_twice", "native", without("rng")),
    "accumulation": ("lends_its_gradients", "native", one_batch_at_a_time),
    "proof": ("noise_without_a_cure", "bare", trust_noise),
    "trajectory": ("copies_its_weights", "native", trust_trajectories),
}


@pytest.mark.parametrize("check", SABOTAGES)
def test_without_a_check_its_control_gets_away(check: str, controls: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    name, arm, sabotage = SABOTAGES[check]
    row = named(name, arm)
    with monkeypatch.context() as patch:
        patch.setattr(training, "_MEMORY", training._Memory())
        sabotage(patch)
        spoilt = verdict_of(judge(row, controls, ENGINE), ENGINE)
    assert spoilt.safe, spoilt
    monkeypatch.setattr(training, "_MEMORY", training._Memory())
    whole = verdict_of(judge(row, controls, ENGINE), ENGINE)
    assert (whole.safe, whole.check) == (False, check)


def test_without_the_run_that_captures_warm_up_gets_away(controls: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    row = named("leaves_its_warm_up", "native")
    assert verdict_of(judge(row, controls, ENGINE), ENGINE).check == "buffers"
    without_the_run_that_captures(monkeypatch)
    assert verdict_of(judge(row, controls, ENGINE), ENGINE).safe


def test_a_search_that_finds_nothing_proves_nothing(controls: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference that eager does not show itself is wrong, not unproven, where no condition takes it away."""
    monkeypatch.setattr(proving, "applicable", lambda has: ())
    found: Verdict = verdict_of(judge(named("layout_by_one_ulp", "bare"), controls, ENGINE), ENGINE)
    assert (found.verdict, found.check) == ("wrong", "gradients")


def test_a_proof_has_to_hold_for_as_many_runs_as_the_quorum(controls: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving.Proving, "holds", lambda self, proof: False)
    found = verdict_of(judge(named("layout_by_one_ulp", "bare"), controls, ENGINE), ENGINE)
    assert not found.safe


def test_counts_of_steps_are_never_put_down_to_random_numbers() -> None:
    from parity.judge.train.causes import lasting

    def apart(a: Any, b: Any) -> Varying:
        (found,) = comparison.varying([bundle([("t", a)])], [bundle([("t", b)])])
        return found

    whole, real = apart(torch.tensor(1), torch.tensor(2)), apart(torch.tensor(1.0), torch.tensor(2.0))
    assert lasting((0, "buffers", whole))
    assert not lasting((0, "buffers", real))
    assert not lasting((0, "outputs", whole))  # an index that is drawn
    assert lasting((0, "gradients", apart(None, torch.tensor(1.0))))


def test_left_has_every_part_once() -> None:
    empty = bundle([])
    assert [name for name, _ in Left(empty, empty, empty, empty, empty).parts()] == ["loss", "outputs", "buffers", "gradients", "rng"]
