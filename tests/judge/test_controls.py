"""The protocol on the emulated engine: every control is judged as declared, and every check has a control that it alone catches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from families.controls import ZOO as CONTROLS
from parity.judge import inference, records, stale, walk
from parity.judge.arms import EagerArm
from parity.judge.inference import judge
from parity.judge.outcome import CAUSES, INFERENCE_CHECKS
from parity.judge.records import Record
from parity.judge.script import INFERENCE, SEQUENCE
from parity.judge.verdict import as_expected, verdict_of
from parity.rows.discovery import Catalogue
from parity.rows.row import Row

from .judging import ENGINE, Scale, catalogue_of, failed, outcome_of, subject, verdict

FAMILIES = [family for family in CONTROLS.families if family.mode == "inference"]
ROWS = [row for family in FAMILIES for row in family.rows()]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_control_gets_the_verdict_cause_and_check_it_declares(row: Row, controls: Catalogue) -> None:
    outcome = judge(row, controls, ENGINE)
    found = verdict_of(outcome, ENGINE)
    expect = controls.family(row).expectation(row, ENGINE, torch.__version__)
    assert as_expected(found, expect), found
    if expect is None:
        assert found.verdict == "screened"
        assert [c.status for c in outcome.checks if c.name != "interleave"] == ["passed"] * (len(INFERENCE_CHECKS) - 1)
        assert outcome.captures >= 1
        assert outcome.replays >= len(SEQUENCE)
        return
    assert (found.verdict, found.cause) == (expect.verdict, expect.cause)
    assert found.cause in CAUSES
    assert found.detail
    assert failed(outcome)[0] == (expect.check or found.check)
    assert [c.name for c in outcome.checks] == list(INFERENCE_CHECKS)


@pytest.mark.parametrize("row", [r for r in ROWS if r.task == "sabotaged" and r.arm == "bare"], ids=str)
def test_a_refusal_or_a_stale_read_names_the_line_of_the_model(row: Row, controls: Catalogue) -> None:
    found = verdict(row, controls)
    if found.verdict == "uncapturable" or found.check in ("churn", "interleave") or found.cause.startswith("python"):
        assert "controls/models.py:" in found.where


def test_every_check_has_a_control() -> None:
    """The tripwire ``stale_guard`` has a unit test instead."""
    declared = {e.check for f in FAMILIES for expects in f.expected.values() for e in expects}
    assert declared - {""} == set(INFERENCE_CHECKS) - {"stale_guard"}


def test_the_eager_arm_is_not_graphed(controls: Catalogue) -> None:
    row = next(r for r in ROWS if r.family == "plain").with_arm("eager")
    found = verdict(row, controls)
    assert (found.verdict, found.check, found.cause) == ("not_graphed", "capture", "host-state")


def test_a_row_is_judged_alike_twice_and_in_any_order(controls: Catalogue) -> None:
    rows = [r for r in ROWS if r.family in ("plain", "views", "counts_its_calls", "draws_noise")]
    told = {row.id: replace(judge(row, controls, ENGINE), seconds={}, peak_memory=0) for row in rows}
    for row in reversed(rows):
        assert replace(judge(row, controls, ENGINE), seconds={}, peak_memory=0) == told[row.id]


# ---- the judge sabotaged: with one check gone, its control gets away, or is called something else


def without(check: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The script without the steps of a check."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        script = tuple(s for s in INFERENCE if s.check != check)
        patch.setattr(walk, "INFERENCE", script)
        patch.setattr(records, "INFERENCE", script)

    return sabotage


def trust_eager(patch: pytest.MonkeyPatch) -> None:
    observe = inference._observe
    patch.setattr(inference, "_observe", lambda bench: replace(observe(bench), noise=[]))


def trust_probes(patch: pytest.MonkeyPatch) -> None:
    """No leaf is dead, and the tripwire behind this check is cut too."""
    observe = inference._observe
    patch.setattr(inference, "_observe", lambda bench: replace(observe(bench), dead=()))
    patch.setattr(walk.Walk, "_after_sequence", lambda self: None)


def trust_the_arm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(walk.Walk, "_capture_check", lambda self, arm: None)


def trust_replays(patch: pytest.MonkeyPatch) -> None:
    """Whatever is replayed, in the sequence and later, is not compared."""
    patch.setattr(Record, "unlike", lambda self, other: [])
    patch.setattr(walk.Walk, "_after_sequence", lambda self: None)


def no_poison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stale, "poison", lambda tensors: 0)


def trust_held(patch: pytest.MonkeyPatch) -> None:
    after = walk.Walk._after_sequence

    def forgetful(self: walk.Walk) -> None:
        self.held.clear()
        after(self)

    patch.setattr(walk.Walk, "_after_sequence", forgetful)


def trust_inputs(patch: pytest.MonkeyPatch) -> None:
    """Inputs afterwards are not recorded."""
    record = walk.record
    patch.setattr(walk, "record", lambda *args: replace(record(*args), inputs=walk.snapshot(args[0], [])))
    record_eager = inference.record_eager
    patch.setattr(
        inference,
        "record_eager",
        lambda bench, subject_, *, whole: [
            replace(r, inputs=walk.snapshot(bench, [])) for r in record_eager(bench, subject_, whole=whole)
        ],
    )


def no_scribble(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(walk.Walk, "_scribble", lambda self, arm, subject_: None)


SABOTAGES: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None], tuple[str, str]]] = {
    # check: (its control, arm, what is done to the judge, (verdict, first failing check) that the control gets then)
    "eager_repeat": ("drawn_outside_the_seed", "bare", trust_eager, ("wrong", "replay")),  # the graph is blamed for eager's noise
    "input_dependence": ("ignores_its_input", "bare", trust_probes, ("screened", "")),
    "capture": ("runs_eagerly_in_secret", "native", trust_the_arm, ("screened", "")),
    "replay": ("counts_its_calls", "bare", trust_replays, ("screened", "")),
    "poison": ("skips_inputs_it_has_seen", "native", no_poison, ("screened", "")),
    "interleave": ("one_entry_cache", "bare", without("interleave"), ("screened", "")),
    "weights": ("caches_scaled_weights", "bare", without("weights"), ("screened", "")),
    "held_outputs": ("hands_out_its_own_memory", "native", trust_held, ("screened", "")),
    "inputs_untouched": ("writes_to_its_input", "bare", trust_inputs, ("screened", "")),
    "escape": ("caches_during_capture", "bare", no_scribble, ("screened", "")),
}


@pytest.mark.parametrize("check", SABOTAGES)
def test_without_a_check_its_control_gets_away(check: str, controls: Catalogue, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name, arm, sabotage, (survives, caught_by) = SABOTAGES[check]
    row = next(r for r in ROWS if r.family == name and r.arm == arm)
    with monkeypatch.context() as patch:
        patch.setattr(inference, "_MEMORY", inference._Memory(warm=True))
        sabotage(patch)
        spoilt = verdict(row, controls)
    assert (spoilt.verdict, spoilt.check) == (survives, caught_by)
    monkeypatch.setattr(inference, "_MEMORY", inference._Memory(warm=True))
    whole = verdict(row, controls)
    assert (whole.safe, whole.check) == (False, check)


class DiesByGarbageCollection(nn.Module):
    """Drops its table while it is captured, and makes another when it is asked for. The dropped one hangs in a cycle: the emulated
    engine reads poison as soon as an owner is gone, so that a table which nothing holds is noticed by ``replay`` already."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.table: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.table:
            self.table = {"values": torch.full((4,), 0.5, device=x.device)}
            self.table["itself"] = self.table
        y = x * self.weight + self.table["values"]
        if torch.cuda.is_current_stream_capturing():
            self.table = {}
        return y


@pytest.mark.parametrize("sabotaged", [False, True])
def test_without_churn_what_dies_by_garbage_collection_gets_away(fresh: None, monkeypatch: pytest.MonkeyPatch, sabotaged: bool) -> None:
    catalogue = catalogue_of(lambda settings: subject(DiesByGarbageCollection()), other_batch=None)
    if sabotaged:
        script = tuple(s for s in INFERENCE if "churn" not in (s.check, s.action))  # interleave churns too
        monkeypatch.setattr(walk, "INFERENCE", script)
        monkeypatch.setattr(records, "INFERENCE", script)
    gc.disable()
    try:
        outcome = outcome_of(catalogue)
    finally:
        gc.enable()
    found = verdict_of(outcome, ENGINE)
    told = (found.verdict, found.check, found.cause)
    assert told == (("screened", "", "") if sabotaged else ("wrong", "churn", "stale-address"))


def test_every_check_was_sabotaged() -> None:
    assert set(SABOTAGES) | {"stale_guard", "churn"} == set(INFERENCE_CHECKS)  # which have a test of their own


# ---- the tripwire


class AnswersB(EagerArm):
    """Captures and replays something, and answers its first call, of probe A, with what eager returned for B."""

    answer: torch.Tensor
    graph: Any = None

    def __call__(self, *args: Any) -> Any:
        if self.graph is not None:
            return super().__call__(*args)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            args[0] * 1
        self.graph.replay()
        return self.answer.to("cuda")


def test_stale_guard_fails_where_the_first_replay_is_eagers_answer_to_b(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``replay`` notices first, so its comparison of the first call is switched off for the second half."""
    catalogue = catalogue_of(lambda settings: subject(Scale()), other_batch=None)
    assert failed(outcome_of(catalogue)) == []
    reference = inference._MEMORY.reference
    assert reference is not None
    first, other = reference.records[:2]
    ((_, answer),) = other.outputs.leaves()
    monkeypatch.setattr(AnswersB, "answer", answer, raising=False)
    monkeypatch.setitem(walk.ARMS, "bare", AnswersB)
    assert failed(outcome_of(catalogue)) == ["replay"]
    compared = Record.unlike
    monkeypatch.setattr(Record, "unlike", lambda self, expected: [] if expected is first else compared(self, expected))
    outcome = outcome_of(catalogue)
    assert failed(outcome)[0] == "stale_guard"
    found = verdict_of(outcome, ENGINE)
    assert (found.verdict, found.cause) == ("wrong", "stale-constant")
    assert "returned what eager returns for probe B" in found.detail
