"""From outcomes to verdicts: a table. What fails first decides, and nothing judged is nothing proved."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from parity.judge import verdict
from parity.judge.outcome import CAUSES, INFERENCE_CHECKS, STATUSES, TRAINING_CHECKS, Check, Outcome
from parity.judge.verdict import SAFE, VERDICTS, Verdict, as_expected, verdict_of
from parity.rows.family import Expect

REPLAYED = Check("replay", "passed")


def outcome(*checks: Check, status: str = "judged", **more: Any) -> Outcome:
    return Outcome("zoo/family/task/inference/b1-float32/bare", status, checks, **more)


FAILURES = [
    # check, figures, verdict, the cause where the check itself names none
    ("eager_repeat", {}, "unstable", "nondeterministic-kernel"),
    ("input_dependence", {}, "vacuous", "dead-input"),
    ("capture", {}, "uncapturable", "unknown"),
    ("capture", {"executed_outside": []}, "uncapturable", "unknown"),
    ("capture", {"executed_outside": ["a_kernel"]}, "wrong", "unknown"),
    ("capture", {"not_graphed": True}, "not_graphed", "host-state"),
    ("replay", {}, "wrong", "unknown"),
    ("stale_guard", {}, "wrong", "unknown"),
    ("poison", {}, "wrong", "unknown"),
    ("churn", {}, "wrong", "unknown"),
    ("interleave", {}, "wrong", "unknown"),
    ("weights", {}, "wrong", "unknown"),
    ("held_outputs", {}, "wrong", "unknown"),
    ("inputs_untouched", {}, "wrong", "unknown"),
    ("escape", {}, "wrong", "unknown"),
]


@pytest.mark.parametrize(("check", "figures", "verdict", "cause"), FAILURES)
@pytest.mark.parametrize("engine", ["cuda", "emulated"])
def test_what_a_failed_check_means(check: str, figures: dict[str, Any], verdict: str, cause: str, engine: str) -> None:
    failed = Check(check, "failed", "a detail", figures=figures)
    assert verdict_of(outcome(failed), engine) == Verdict(verdict, cause, "", "a detail", check)
    named = Check(check, "failed", "a detail", "side-stream", "model.py:3 x", figures)
    assert verdict_of(outcome(named), engine) == Verdict(verdict, "side-stream", "model.py:3 x", "a detail", check)


TRAINING_FAILURES = [
    ("eager_step", {}, "vacuous", "dead-input"),
    ("capture", {}, "uncapturable", "unknown"),
    ("capture", {"not_graphed": True}, "not_graphed", "host-state"),
    ("loss", {}, "wrong", "unknown"),
    ("outputs", {}, "wrong", "unknown"),
    ("buffers", {}, "wrong", "unknown"),
    ("gradients", {}, "wrong", "unknown"),
    ("rng", {}, "wrong", "unknown"),
    ("accumulation", {}, "wrong", "unknown"),
    ("proof", {}, "unproven", "unknown"),
    ("trajectory", {}, "wrong", "unknown"),
]


@pytest.mark.parametrize(("check", "figures", "verdict", "cause"), TRAINING_FAILURES)
def test_what_a_failed_check_of_training_means(check: str, figures: dict[str, Any], verdict: str, cause: str) -> None:
    others = [Check(name, "passed") for name in TRAINING_CHECKS if name != check]
    failed = Check(check, "failed", "a detail", figures=figures)
    assert verdict_of(outcome(*others, failed), "cuda") == Verdict(verdict, cause, "", "a detail", check)


@pytest.mark.parametrize("missing", [name for name in TRAINING_CHECKS if name != "eager_step"])
def test_every_check_of_training_has_to_be_passed(missing: str) -> None:
    whole = [Check(name, "passed") for name in TRAINING_CHECKS]
    assert verdict_of(outcome(*whole), "emulated") == Verdict("screened")
    for gap in ([c for c in whole if c.name != missing], [Check(missing, "skipped") if c.name == missing else c for c in whole]):
        with pytest.raises(ValueError, match=f"no check failed, yet no {missing} was judged"):
            verdict_of(outcome(*gap), "cuda")


def test_the_table_is_whole() -> None:
    assert {check for check, *_ in FAILURES} == set(INFERENCE_CHECKS)
    assert {check for check, *_ in TRAINING_FAILURES} == set(TRAINING_CHECKS)
    assert {v for _, _, v, _ in FAILURES} <= set(VERDICTS)
    assert {c for *_, c in FAILURES} <= set(CAUSES)


@pytest.mark.parametrize(("engine", "verdict"), [("cuda", "certified"), ("emulated", "screened")])
def test_only_a_device_certifies(engine: str, verdict: str) -> None:
    found = verdict_of(outcome(*(Check(name, "passed") for name in INFERENCE_CHECKS)), engine)
    assert found == Verdict(verdict)
    assert found.safe


def test_a_cause_that_is_none_of_ours_is_unknown() -> None:
    assert verdict_of(outcome(Check("capture", "failed", "a hook", "escape")), "cuda").cause == "unknown"
    assert all(verdict_of(outcome(Check("capture", "failed", "why", cause)), "cuda").cause == cause for cause in CAUSES)


def test_every_cause_that_the_package_raises_is_listed() -> None:
    package = Path(verdict.__file__).parents[1]
    raised = {
        node.args[0].value
        for path in [*package.glob("judge/**/*.py"), *package.glob("runtime/**/*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("CaptureRefused", "Violation", "Finding") and node.args
        if isinstance(node.args[0], ast.Constant)
    }
    assert len(raised) > 10
    assert raised <= {*CAUSES, ""}


def test_the_first_failure_decides() -> None:
    checks = (REPLAYED, Check("weights", "failed", cause="stale-constant"), Check("escape", "failed", cause="stale-address"))
    assert verdict_of(outcome(*checks), "cuda").check == "weights"
    assert verdict_of(outcome(*checks[::-1]), "cuda").check == "escape"


@pytest.mark.parametrize(
    "checks",
    [(), (Check("replay", "skipped"),), (Check("capture", "passed"),), tuple(Check(n, "skipped") for n in INFERENCE_CHECKS)],
)
def test_nothing_judged_is_nothing_proved(checks: tuple[Check, ...]) -> None:
    with pytest.raises(ValueError, match=r"zoo/family/task.*no check failed, yet no replay was judged: this record proves nothing"):
        verdict_of(outcome(*checks), "cuda")


@pytest.mark.parametrize("status", [s for s in STATUSES if s != "judged"])
def test_what_was_not_judged_is_called_what_it_is(status: str) -> None:
    """Even with a check that passed or failed beside it."""
    found = verdict_of(outcome(REPLAYED, Check("weights", "failed"), status=status, message="why"), "cuda")
    assert found == Verdict("crashed" if status == "broken" else status, "unknown", detail="why")
    assert found.verdict in VERDICTS
    assert not found.safe


WRONG = Verdict("wrong", "stale-address", "m.py:1", "d", "churn")
REASON = "for a reason that one can read"


@pytest.mark.parametrize(
    ("verdict", "expect", "expected"),
    [
        (Verdict("certified"), None, True),
        (Verdict("screened"), None, True),
        (WRONG, None, False),
        (Verdict("unavailable", "unknown"), None, False),
        (WRONG, Expect("wrong", REASON), True),
        (WRONG, Expect("wrong", REASON, "stale-address"), True),
        (WRONG, Expect("wrong", REASON, "stale-address", check="churn"), True),
        (WRONG, Expect("wrong", REASON, "stale-constant"), False),
        (WRONG, Expect("wrong", REASON, "stale-address", check="replay"), False),
        (WRONG, Expect("uncapturable", REASON), False),
        (Verdict("certified"), Expect("wrong", REASON), False),  # better than declared
        (Verdict("screened"), Expect("uncapturable", REASON, "host-sync"), False),
        (Verdict("wrong", "unknown"), Expect("wrong", REASON), False),
        (Verdict("wrong", "unknown"), Expect("wrong", REASON, "unknown"), False),
        (Verdict("crashed", "unknown"), Expect("crashed", REASON), False),
    ],
)
def test_what_counts_as_expected(verdict: Verdict, expect: Expect | None, expected: bool) -> None:
    assert as_expected(verdict, expect) is expected


def test_safe_verdicts_are_verdicts() -> None:
    assert set(VERDICTS) > SAFE


# ---- outcomes as plain data


def test_an_outcome_comes_back_from_its_dictionary() -> None:
    whole = outcome(REPLAYED, probes=({"probe": "A"},), leaves=("x",), notes=("n",), seconds={"arm": 1.0}, environment={"torch": "2"},
                    training={"class": "exact", "tensors": [0, 4]})  # fmt: skip
    assert Outcome.from_dict(whole.to_dict()) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "an outcome has no field colour"),
        ({"status": "fine"}, "status='fine' is none of judged"),
        ({"checks": [{"name": "replay"}]}, "not an outcome"),
        ({"checks": [{"name": "replay", "status": "passed", "mood": 1}]}, "not an outcome"),
    ],
)
def test_what_is_no_outcome(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Outcome.from_dict({**outcome(REPLAYED).to_dict(), **change})


def test_an_outcome_without_a_row_or_status() -> None:
    with pytest.raises(ValueError, match="not an outcome"):
        Outcome.from_dict({"status": "judged"})
