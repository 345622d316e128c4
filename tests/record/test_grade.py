"""Classes and proofs as text there and back, and when one proof is weaker than another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from families.controls.training import FAMILIES as TRAINING
from parity.judge.outcome import CAUSES, CLASSES, TRAINING_CHECKS, Check, Outcome
from parity.record.grade import Grade, cause_of, check_training, graded, proof_text, weakest
from parity.record.line import is_expected, record_of
from parity.rows.row import Settings

from .records import failing, record, told, trained

SETTINGS = st.builds(Settings, st.integers(0, 999), st.integers(1, 9), st.sampled_from(["float16", "bfloat16", "float32"])).map(str)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters=",\n"), min_size=1, max_size=12).filter(lambda s: s == s.strip())
GRADES = st.builds(Grade, SETTINGS, st.sampled_from(CLASSES), st.lists(NAMES, max_size=4, unique=True).map(tuple))


@given(GRADES)
def test_a_grade_comes_back_from_its_text(grade):
    assert Grade.parse(str(grade)) == grade


@given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_whatever_a_record_may_name_as_a_proof_comes_back_from_its_certificate(proof):
    entry = trained(says=told("eager_noise", *proof))
    check_training(entry)
    assert Grade.parse(str(Grade.of(entry))).conditions == tuple(proof)


def test_a_grade_as_it_stands_in_the_allowlist():
    assert str(Grade.of(trained())) == "64px-b2-float16: exact"
    assert str(Grade("b2-float32", "one_ulp", ("a", "b"))) == "b2-float32: one_ulp, proved by a, b"


@pytest.mark.parametrize("text", ["", "exact", "b2-float32:exact", "b2-float32: exact, proved by ", "b2-float32: exact and more"])
def test_what_no_grade_is(text):
    with pytest.raises(ValueError, match="not the grade of a row"):
        Grade.parse(text)


@given(GRADES, GRADES)
def test_a_weaker_proof_needs_what_the_other_does_not(one, other):
    more = one.weaker_than(other)
    assert set(more) == set(one.conditions) - set(other.conditions)
    assert one.weaker_than(one) == ()


@given(st.lists(GRADES, min_size=1, max_size=5))
def test_the_weakest_class_stands_for_all(grades):
    assert weakest(grades) == CLASSES[max(CLASSES.index(grade.name) for grade in grades)]


@pytest.mark.parametrize("name", CLASSES)
def test_which_classes_need_a_proof(name):
    if name in ("exact", "own_rng"):
        check_training(trained(says=told(name)))
    else:
        with pytest.raises(ValueError, match=f"of class {name} without a proof"):
            check_training(trained(says=told(name)))


@pytest.mark.parametrize("word", ["", " a", "a ", "a,b", "a\nb", 3, None])
def test_what_no_condition_is_called(word):
    with pytest.raises(ValueError, match="proof must be a list of names without commas"):
        check_training(trained(says=told("one_ulp") | {"proof": [word]}))


def test_causes_are_told_of_safe_rows_too():
    assert cause_of(trained(says=told("one_ulp", "a", cause="grad-layout"))) == "grad-layout"
    assert cause_of(record(checks=failing("replay", "rng"))) == "rng"
    assert cause_of(record()) == cause_of(trained()) == ""
    assert "grad-layout" in CAUSES


def test_a_verdict_in_a_word():
    assert graded(record()) == "certified"
    assert graded(trained()) == "certified (exact)"
    assert proof_text([]) == "no condition"


@pytest.mark.parametrize(("found", "expected"), [("one_ulp", True), ("float_rounding", False)])
def test_a_control_of_another_class_is_not_as_declared(found: str, expected: bool) -> None:
    family = next(f for f in TRAINING if f.name == "layout_by_one_ulp")
    row = next(r for r in family.rows() if r.arm == "bare")
    told = {"class": found, "cause": "grad-layout", "proof": ["incoming-layout-of-outputs"], "tensors": [1, 2]}
    outcome = Outcome(row.id, "judged", tuple(Check(name, "passed") for name in TRAINING_CHECKS), training=told)
    record = record_of(outcome, row, family, "cuda", "1", "parity certify", environment={})
    assert record["verdict"] == "certified"
    assert record["expected_class"] == "one_ulp/grad-layout"
    assert is_expected(record) is expected
