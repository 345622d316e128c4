"""JUnit XML says what the evidence says, and is XML whatever a message holds."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from parity.record.junit import render_junit, write_junit

from .records import failing, one_failed, record, small_matrix, told, trained


def _suite(records):
    return ElementTree.fromstring(render_junit(records).encode())[0]


def test_each_row_is_a_case(tmp_path):
    rows = [*small_matrix(), record(size=128, checks=failing("replay", "rng", "a.py:3 x"))]
    suite = _suite(rows)
    counted = {name: suite.get(name) for name in ("tests", "failures", "skipped")}
    assert counted == {"tests": "12", "failures": "1", "skipped": "1"}
    assert [case.get("name") for case in suite] == sorted(r["id"] for r in rows)
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "wrong (rng), declared certified"
    assert "a.py:3 x" in failure.text
    assert next(suite.iter("skipped")).get("message") == "its weights need the network"
    write_junit(rows, tmp_path / "junit.xml")
    assert (tmp_path / "junit.xml").read_text() == render_junit(rows)


def test_a_training_row_has_its_class_and_proof_as_properties():
    entry = trained(says=told("one_ulp", "a", "b", cause="grad-layout"))
    (case,) = _suite([entry])
    assert case.get("name") == entry["id"]
    assert {p.get("name"): p.get("value") for p in case.iter("property")} == {
        "class": "one_ulp",
        "proof": "a, b",
        "cause": "grad-layout",
    }
    assert not list(case.iter("failure"))
    assert not list(_suite([record()]).iter("property"))


def test_an_unproven_row_fails_with_the_command():
    entry = trained(says=told(""), checks=one_failed("proof", "unknown"))
    (failure,) = _suite([entry]).iter("failure")
    assert failure.get("message") == "unproven (unknown), declared certified"
    assert entry["command"] in failure.text
    assert not list(_suite([entry]).iter("property"))


@given(st.text(st.characters(codec=None)))
def test_any_message_is_xml(text):
    entry = record(status="crashed", message=text)
    assert len(list(_suite([entry]).iter("failure"))) == 1
