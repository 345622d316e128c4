"""Every kind of change between two evidence files, alone; and nothing where there is none."""

from __future__ import annotations

from parity.judge.outcome import Check
from parity.record.diff import Change, diff, exit_code, render_diff
from parity.record.line import census

from .records import H200, failing, family, one_failed, passing, record, small_matrix, small_training, told, trained


def _one(old, new) -> Change:
    (change,) = diff(old, new)
    return change


def test_nothing_changed():
    assert diff(small_matrix(), small_matrix()) == []
    assert diff(small_training(), small_training()) == []
    assert render_diff([]) == "nothing changed"
    assert exit_code([]) == 0


def test_seconds_are_not_a_change():
    assert diff([record()], [record(seconds={"judge": 9.0}, recorded="2027-01-01T00:00:00.000+00:00")]) == []


def test_rows_come_and_go():
    assert _one([record()], [record(), record("bare")]).kind == "added"
    gone = _one([record(), record("bare")], [record()])
    assert (gone.kind, gone.message) == ("removed", "was certified, has no evidence now")
    assert exit_code([gone]) == 1


def test_a_verdict():
    changes = diff([record()], [record(checks=failing("escape", "rng"))])
    assert changes[0] == Change(record()["id"], "verdict", "certified -> wrong (rng)")
    assert exit_code(changes) == 1


def test_a_cause_and_a_line():
    old, new = (record(checks=failing("replay", cause, "a.py:1 x")) for cause in ("rng", "buffer-drift"))
    assert (_one([old], [new]).kind, _one([old], [new]).message) == ("cause", "rng -> buffer-drift")
    moved = _one([old], [record(checks=failing("replay", "rng", "a.py:2 x"))])
    assert (moved.kind, moved.message) == ("where", "a.py:1 x -> a.py:2 x")
    assert exit_code([moved]) == 0


def test_a_class():
    changes = diff([trained()], [trained(says=told("one_ulp", "incoming-layout", cause="grad-layout", tensors=(2, 240)))])
    assert [(c.kind, c.message) for c in changes] == [
        ("cause", "none -> grad-layout"),
        ("class", "exact -> one_ulp"),
        ("proof", "no condition -> incoming-layout: needs incoming-layout besides"),
        ("figures", "tensors 0 of 240 differing -> 2 of 240 differing"),
    ]
    assert [exit_code([c]) for c in changes] == [1, 1, 1, 0]
    assert diff([trained()], [trained()]) == []


def test_a_proof():
    one, other = (trained(says=told("eager_noise", *proof)) for proof in (("a", "b"), ("b", "c")))
    change = _one([one], [other])
    assert (change.kind, change.message) == ("proof", "a, b -> b, c: needs c besides and no longer needs a")
    assert exit_code([change]) == 1
    assert diff([one], [trained(says=told("eager_noise", "b", "a"))]) == [], "their order says nothing"


def test_a_class_is_lost_with_the_verdict():
    changes = diff([trained(says=told("one_ulp", "a"))], [trained(says=told(""), checks=one_failed("proof", "unknown"))])
    assert [(c.kind, c.message) for c in changes][:3] == [
        ("verdict", "certified (one_ulp) -> unproven (unknown)"),
        ("class", "one_ulp -> none"),
        ("proof", "a -> no condition: no longer needs a"),
    ]


def test_the_kernel_census():
    old, new = record(checks=passing(kernels={"gemm": 4, "relu": 2})), record(checks=passing(kernels={"gemm": 5}))
    change = _one([old], [new])
    assert (change.kind, change.message) == ("kernels", "6 -> 5: gemm 4 -> 5, relu 2 -> 0")
    assert exit_code([change]) == 0
    assert _one([record()], [new]).message == "a census of 0 kernels -> of 5"
    replayed = record(checks=[Check("replay", "passed", figures={"kernels": {"gemm": 5}})])
    assert census(replayed) == census(new) == {"gemm": 5}


def test_figures():
    old, new = record(checks=passing(pool=1), replays=6), record(checks=passing(pool=2), replays=7)
    assert _one([old], [new]).message == "replays 6 -> 7, capture.pool 1 -> 2"
    assert "peak_memory 1048576 -> 5" in _one([record()], [record(peak_memory=5)]).message
    assert "escape passed -> absent" in _one([record()], [record(checks=passing()[:-1])]).message


def test_the_environment_is_told_first():
    changes = diff([record()], [record("bare", environment=H200 | {"torch": "2.12.0"}, of=family())])
    assert [c.kind for c in changes] == ["environment", "removed", "added"]
    assert changes[0].message == "torch 2.11.0+cu130 -> 2.12.0"
    lines = render_diff(changes).splitlines()
    assert lines[:3] == ["environment:", "  torch 2.11.0+cu130 -> 2.12.0", "removed:"]
    assert record("bare")["id"] in lines[-1]
