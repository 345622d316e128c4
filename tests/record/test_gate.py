"""Each finding of the gate, triggered alone; and no finding where evidence and allowlist agree."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from parity.record.allowlist import build_allowlist
from parity.record.gate import KINDS, Commands, Finding, exit_code, gate, render
from parity.record.line import is_expected, rerun
from parity.rows.family import Expect
from parity.runtime.allowlist import Allowlist

from .records import (
    H200,
    H200_NAME,
    YOLO9,
    failing,
    family,
    one_failed,
    record,
    row_of,
    small_matrix,
    small_training,
    told,
    trained,
    training,
)  # fmt: skip

X, Y = family("x"), family("y")
BASE = [record(of=X), record(of=Y)]
LIST = build_allowlist(BASE)


def _gate(records, allowlist=LIST, rows=None, **options):
    rows = [row_of(entry) for entry in records] if rows is None else rows
    return gate(records, allowlist, rows, **options)


def _alone(findings, kind) -> Finding:
    assert [finding.kind for finding in findings] == [kind]
    assert exit_code(findings) == KINDS[kind]
    return findings[0]


def test_evidence_that_agrees_gives_nothing():
    assert _gate(BASE) == []
    whole = small_matrix()[:-1]
    assert _gate(whole, build_allowlist(whole), complete=True) == []
    assert exit_code([]) == 0


def test_regression():
    where = "x.py:3 a = b"
    found = _alone(_gate([record(checks=failing("replay", "stale-constant", where), of=X), BASE[1]]), "regression")
    assert found.message == f"was certified on {H200_NAME}, is now wrong (stale-constant) at {where}"
    assert found.command.startswith(rerun(row_of(record(of=X)), "cuda"))
    assert found.command.endswith("parity report")


@pytest.mark.parametrize("status", ["crashed", "timed_out", "out_of_memory"])
def test_a_certified_family_that_could_not_be_judged_is_a_regression(status):
    found = _alone(_gate([record(of=X, status=status), BASE[1]]), "regression")
    assert status in found.message


def test_another_size_of_a_certified_family_regresses():
    records = [*BASE, record(of=X, size=128, checks=failing("churn", "stale-address"))]
    assert _alone(_gate(records), "regression").row.endswith("/128px-b1-float32/graphed")


def test_unlisted_success():
    found = _alone(_gate([*BASE, record(of=family("z"))]), "unlisted success")
    assert found.row == "libreyolo/z/detect/inference"
    assert found.command == "parity report"


def test_a_row_that_nobody_asked_for_still_takes_its_family_out():
    crashed = record(of=family("z"), size=128, status="crashed")
    records = [*BASE, record(of=family("z")), crashed]
    assert _gate(records, rows=[row_of(r) for r in records if r is not crashed]) == []


def test_a_missing_row():
    found = _alone(_gate(BASE[:1], rows=[row_of(entry) for entry in BASE]), "missing row")
    assert found.row == BASE[1]["id"]
    wanted = "parity certify --zoo libreyolo --family y --task detect --mode inference --arm graphed --size 64 --engine cuda"
    assert found.command == wanted


def test_no_evidence_at_all_is_every_row_missing():
    assert [f.kind for f in _gate([], rows=[row_of(entry) for entry in BASE])] == ["missing row"] * 2


def test_a_stale_row_counts_as_missing():
    found = _alone(_gate(BASE, stale={BASE[0]["id"]: "the judge changed"}), "missing row")
    assert found.message == "its evidence no longer holds: the judge changed"


def test_an_unavailable_row_counts_as_missing():
    found = _alone(_gate([record(of=X, status="unavailable", message="no wheel"), BASE[1]]), "missing row")
    assert "no wheel" in found.message


def test_a_row_that_is_declared_unavailable_is_no_finding():
    gone = family("gone", unavailable="its weights need the network")
    lacking = record(of=gone, status="unavailable", message=gone.unavailable)
    assert (lacking["expected"], is_expected(lacking)) == ("unavailable", True)
    assert _gate([*BASE, lacking]) == []


def test_zero_captures():
    records = [*BASE, record("native", of=X, captures=0)]
    assert "0 captures and 6 replays" in _alone(_gate(records), "zero captures").message
    assert _alone(_gate([*BASE, record("native", of=X, replays=0)]), "zero captures")


def test_a_listed_family_without_captures_is_no_certificate():
    kinds = {f.kind for f in _gate([record(of=X, captures=0), BASE[1]])}
    assert "zero captures" in kinds
    assert build_allowlist([record(of=X, captures=0)]).certificates == ()


def test_no_baseline_for_this_environment():
    elsewhere = [record(of=X, environment=H200 | {"gpu": "NVIDIA B200", "arch": "sm100"})]
    found = _alone(_gate(elsewhere), "no baseline")
    assert "nvidia-b200-sm100" in found.row
    assert H200_NAME in found.message
    assert _alone(_gate(BASE, Allowlist()), "no baseline").message.endswith("none at all")


def test_an_environment_where_nothing_is_certified_is_still_a_baseline():
    records = [record(checks=failing("replay", "rng"))]
    assert _gate(records, build_allowlist(records)) == []


def test_emulated_evidence_has_no_baseline_and_nothing_else_is_said_of_it():
    emulated = [record(of=X, engine="emulated"), record("native", of=X, engine="emulated", captures=0)]
    rows = [row_of(entry) for entry in [*emulated, BASE[1]]]
    found = _alone(_gate(emulated, rows=rows, stale={emulated[0]["id"]: "the judge changed"}), "no baseline")
    assert "certifies nothing" in found.message
    assert found.row.startswith("emulated-")
    assert _alone(_gate(emulated, rows=rows[2:]), "no baseline"), "of a selection without evidence, too"


# --- commands
HERE = Commands()
FRESH = Commands(("my zoos",), Path("fresh"), Path("fresh"))
ELSEWHERE = Commands((), Path("fresh"), Path("held"), (Path("fresh/evidence/a.jsonl"),))


@pytest.mark.parametrize(
    ("commands", "update", "options"),
    [
        (HERE, "parity report", []),
        (Commands(evidence=(Path("reports/evidence/a.jsonl"),)), "parity report", []),
        (Commands(evidence=(Path("a.jsonl"),)), "parity report --merge a.jsonl", []),
        (FRESH, "parity report --reports fresh", ["--families", "my zoos", "--reports", "fresh"]),
        (ELSEWHERE, "parity report --reports held --merge fresh/evidence/a.jsonl", ["--reports", "fresh"]),
        (Commands((), Path("fresh"), Path("reports"), ELSEWHERE.evidence), "parity report --merge fresh/evidence/a.jsonl",
         ["--reports", "fresh"]),
    ],
)  # fmt: skip
def test_commands_go_where_the_gate_was_told_to_look(commands, update, options):
    again = [*shlex.split(rerun(row_of(BASE[0]), "cuda")), *options]
    assert commands.update == update
    assert shlex.split(commands.again(row_of(BASE[0]))) == again
    assert shlex.split(commands.certify("--resume")) == ["parity", "certify", "--resume", "--engine", "cuda", *options]
    wrong = record(checks=failing("replay", "rng"), of=X)
    listed = build_allowlist([*BASE, record(of=family("moved"))])
    records = [wrong, record(of=family("z")), record(of=family("moved"), zoo_version="1.7.0")]
    findings = _gate(records, listed, [*map(row_of, records), row_of(BASE[1])], commands=commands)
    assert {f.kind: f.command for f in findings} == {
        "regression": f"{shlex.join(again)}  # if it is meant: {update}",
        "unlisted success": update,
        "outdated certificate": update,
        "missing row": commands.again(row_of(BASE[1])),
    }
    (found,) = _gate(BASE, Allowlist(), commands=commands)
    assert found.command == f"{update}  # then commit {commands.folder}/"
    many = [Finding("missing row", f"zoo/f{i}/detect/inference/8px-b1-float32/graphed", "no evidence", "c") for i in range(5)]
    more = render(many, commands).splitlines()[-1].strip()
    assert more == commands.certify("--zoo", "zoo", "--mode", "inference", "--resume")


def test_an_outdated_certificate():
    records = [record(of=X, zoo_version="1.7.0"), BASE[1]]
    found = _alone(_gate(records), "outdated certificate")
    assert found.message == "was certified with zoo '1.6.0', now '1.7.0'"
    assert _alone(_gate([record(of=X, environment=H200 | {"cudnn": "92000"}), BASE[1]]), "outdated certificate")


def test_a_certificate_without_rows_is_found_only_in_a_complete_run():
    assert _gate(BASE[:1]) == []
    assert "no row of it is declared" in _alone(_gate(BASE[:1], complete=True), "missing row").message


def test_a_certificate_whose_declared_row_lacks_evidence_is_told_of_once():
    found = _alone(_gate(BASE[:1], rows=[row_of(entry) for entry in BASE], complete=True), "missing row")
    assert found.message == "no evidence on this environment"


def test_a_control_that_survives_voids_the_run():
    must_fail = {"bare": (Expect("wrong", "it counts in Python", "python-counter"),)}
    control = family("counter", "control", zoo="controls", expected=must_fail)
    caught = record("bare", failing("replay", "python-counter"), of=control)
    assert _gate([*BASE, caught]) == []
    found = _alone(_gate([*BASE, record("bare", of=control)]), "control survived")
    assert "must be wrong (python-counter), is certified" in found.message
    other = record("bare", failing("replay", "rng"), of=control)
    assert _alone(_gate([*BASE, other]), "control survived")


def test_controls_and_other_boundaries_never_enter_the_allowlist():
    control = record(of=family("fine", "control", zoo="controls"))
    whole = record(of=family("z"), boundary="whole")
    assert _gate([*BASE, control, whole]) == []


def test_records_of_other_rows_are_not_looked_at():
    assert _gate([*BASE, record(of=family("z"))], rows=[row_of(entry) for entry in BASE]) == []


def test_native_and_bare_do_not_touch_the_allowlist():
    assert _gate([*BASE, record("native", failing("churn", "stale-address"), of=YOLO9), record("bare", of=YOLO9)]) == []


def test_the_worst_stands_first_and_a_finding_is_told_with_its_command():
    records = [record(of=X, checks=failing("replay", "rng")), record(of=family("z"))]
    findings = _gate(records, rows=[row_of(entry) for entry in [*records, BASE[1]]])
    assert [f.kind for f in findings] == ["regression", "unlisted success", "missing row"]
    assert exit_code([*findings, Finding("no baseline", "a", "b", "c")]) == 2
    assert str(findings[1]).splitlines()[1] == "    parity report"
    assert set(findings[0].to_dict()) == {"kind", "row", "message", "command"}


# --- training

NOISE = told("eager_noise", "cudnn-deterministic", "math-sdpa", cause="nondeterministic-kernel", tensors=(3, 240))
TRAINED = [trained(), trained(says=NOISE, dtype="float32")]
TRAINING_LIST = build_allowlist(TRAINED)


def _trained(says, dtype="float32", **more):
    """The rows of TRAINED, the one of that dtype as told."""
    return [trained(says=says, dtype=dtype, **more), *(entry for entry in TRAINED if not entry["settings"].endswith(dtype))]


def test_training_that_agrees_gives_nothing():
    assert _gate(TRAINED, TRAINING_LIST) == []
    whole = [*small_matrix()[:-1], *small_training()]
    assert _gate(whole, build_allowlist(whole), complete=True) == []


def test_another_class_must_be_looked_at():
    found = _alone(_gate(_trained(told("one_ulp", "cudnn-deterministic")), TRAINING_LIST), "class changed")
    assert found.row == TRAINED[1]["id"]
    assert found.message == (
        f"was eager_noise on {H200_NAME}, is now one_ulp; proved by cudnn-deterministic, math-sdpa then, by cudnn-deterministic now"
    )
    assert found.command == f"{rerun(row_of(TRAINED[1]), 'cuda')}  # if it is meant: parity report"
    assert "--mode training" in found.command
    assert "--dtype float32" in found.command
    assert _alone(_gate(_trained(told()), TRAINING_LIST), "class changed"), "a better one is no surprise that nobody sees"


def test_a_weaker_proof_must_be_looked_at():
    found = _alone(_gate(_trained(told("eager_noise", "cudnn-deterministic", "tf32-off")), TRAINING_LIST), "weaker proof")
    assert found.message.startswith("equal to eager only with tf32-off besides, which its certificate does not ask for; proved by ")
    more = told("eager_noise", "cudnn-deterministic", "math-sdpa", "tf32-off")
    assert _alone(_gate(_trained(more), TRAINING_LIST), "weaker proof")
    generator = told("exact", "rng-aligned", cause="rng")
    assert _alone(_gate(_trained(generator, "float16"), TRAINING_LIST), "weaker proof").row == TRAINED[0]["id"]


def test_a_stronger_proof_outdates_the_certificate():
    found = _alone(_gate(_trained(told("eager_noise", "math-sdpa")), TRAINING_LIST), "outdated certificate")
    assert found.command == "parity report"


def test_the_order_of_conditions_says_nothing():
    assert _gate(_trained(NOISE | {"proof": NOISE["proof"][::-1]}), TRAINING_LIST) == []


@pytest.mark.parametrize(
    "entry",
    [
        {"checks": one_failed("proof", "unknown"), "says": told("")},
        {"checks": one_failed("capture", "host-sync"), "says": told("")},
        {"status": "crashed", "says": told("")},
        {"status": "timed_out", "says": told("")},
        {"says": told("own_rng", cause="rng")},
    ],
)
def test_a_certified_setting_that_is_safe_no_more_is_a_regression(entry):
    found = _alone(_gate(_trained(**entry), TRAINING_LIST), "regression")
    assert found.row == TRAINED[1]["id"]
    assert "--dtype float32" in found.command


def test_a_wrong_setting_regresses_even_where_the_certificate_does_not_name_it():
    wrong = trained("graphed", told(""), dtype="bfloat16", checks=one_failed("gradients", "buffer-drift"))
    assert _alone(_gate([*TRAINED, wrong], TRAINING_LIST), "regression").row == wrong["id"]


def test_an_unproven_setting_beside_a_certificate_is_not_the_gates_business():
    unproven = trained("graphed", told(""), dtype="bfloat16", checks=one_failed("proof", "unknown"))
    assert _gate([*TRAINED, unproven], TRAINING_LIST) == []
    assert build_allowlist([*TRAINED, unproven]) == TRAINING_LIST


def test_a_setting_that_its_familys_certificate_does_not_name():
    found = _alone(_gate([*TRAINED, trained(dtype="bfloat16")], TRAINING_LIST), "unlisted success")
    assert found.row.endswith("/64px-b2-bfloat16/graphed")


def test_modes_do_not_answer_for_each_other():
    assert _alone(_gate([*TRAINED, *BASE], TRAINING_LIST, rows=[row_of(e) for e in [*TRAINED, BASE[0]]]), "unlisted success").row == (
        "libreyolo/x/detect/inference"
    )
    control = training("drops", "control", zoo="controls", expected={"bare": (Expect("wrong", "it drops a gradient", "host-state"),)})
    assert _gate([*TRAINED, trained("bare", told(""), of=control, checks=one_failed("gradients", "host-state"))], TRAINING_LIST) == []
    assert _alone(_gate([*TRAINED, trained("bare", of=control)], TRAINING_LIST), "control survived")


def test_many_missing_rows_of_one_zoo_get_one_command():
    rows = [
        Finding("missing row", f"zoo/f{i}/detect/inference/8px-b1-float32/graphed", "no evidence", f"certify {i}") for i in range(5)
    ]
    other = Finding("missing row", "zoo/t/detect/training/8px-b1-float32/graphed", "no evidence", "certify t")
    lines = render([Finding("regression", "zoo/x", "was certified", "again"), *rows, other], shown=3).splitlines()
    assert lines[0].startswith("regression: zoo/x")
    assert [line.split("/")[1] for line in lines if "no evidence" in line] == ["f0", "f1", "f2", "t"]
    (more,) = (i for i, line in enumerate(lines) if "2 more of zoo, inference" in line)
    assert lines[more + 1].split() == ["parity", "certify", "--zoo", "zoo", "--mode", "inference", "--resume", "--engine", "cuda"]
    assert render(rows[:3], shown=3) == "\n".join(map(str, rows[:3]))
