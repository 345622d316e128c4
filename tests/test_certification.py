"""One certification run, whichever door it came through: shards, controls, what counts as expected, and the words."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from doors import FakePool, fake_probe, outcome_of, write_families
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from parity import certification
from parity.certification import (
    STUDY,
    Certification,
    groups_of,
    left_out,
    rerun,
    screened,
    shard_of,
    with_controls,
)  # fmt: skip
from parity.cli import main
from parity.judge.outcome import Outcome
from parity.judge.verdict import as_expected
from parity.progress import Progress, print_summary
from parity.record.evidence import EvidenceFile, read_evidence
from parity.record.files import RecordError
from parity.record.line import record_of, verdict
from parity.record.told import in_full, line
from parity.rows.discovery import Catalogue, DiscoveryError, Selection, discover
from parity.rows.family import Expect
from parity.rows.row import ARMS, Row, Settings
from parity.run.isolate import Options

WORDS = st.sampled_from(["ab", "cd", "ef"])
ROWS = st.lists(
    st.builds(Row, WORDS, WORDS, WORDS, st.just("inference"), st.builds(Settings, st.sampled_from([0, 64])), st.sampled_from(ARMS)),
    unique=True,
    max_size=20,
)


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalogue]:
    monkeypatch.setattr(certification, "Pool", FakePool)
    monkeypatch.setattr(certification, "probe", fake_probe)
    for name in ("judged", "explained", "asked"):
        monkeypatch.setattr(FakePool, name, [])
    yield discover([write_families(tmp_path, "small_zoos")])
    for name in [n for n in sys.modules if n.split(".")[0] == "small_zoos"]:
        del sys.modules[name]


@pytest.fixture
def trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalogue]:
    """The small zoo with rows of training."""
    monkeypatch.setattr(certification, "Pool", FakePool)
    monkeypatch.setattr(certification, "probe", fake_probe)
    monkeypatch.setattr(FakePool, "judged", [])
    yield discover([write_families(tmp_path, "small_zoos", training=True)])
    for name in [n for n in sys.modules if n.split(".")[0] == "small_zoos"]:
        del sys.modules[name]


def select(catalogue: Catalogue, *families: str) -> list[Row]:
    return catalogue.select(Selection(families=families))


def record(catalogue: Catalogue, row: Row) -> dict[str, Any]:
    return record_of(outcome_of(row), row, catalogue.declaration(row), "emulated", "1.0", rerun(row, "emulated"))


# ---- groups and shards


@given(ROWS)
def test_groups_hold_every_row_once_by_subject(rows: list[Row]) -> None:
    groups = groups_of(rows)
    assert sorted(r for g in groups for r in g) == sorted(rows)
    assert all(len({r.subject for r in g}) == 1 for g in groups)
    assert len({g[0].subject for g in groups}) == len(groups)
    order = ["eager", "graphed", "native", "bare"]
    assert all([r.arm for r in g] == sorted((r.arm for r in g), key=order.index) for g in groups)


@given(ROWS, st.integers(1, 7))
def test_shards_partition_the_rows(rows: list[Row], parts: int) -> None:
    shards = [shard_of(rows, f"{i}/{parts}") for i in range(1, parts + 1)]
    assert sorted(r for s in shards for r in s) == sorted(rows)  # all of them, none twice
    owners = [{r.subject for r in s} for s in shards]
    assert len(set().union(*owners)) == sum(map(len, owners))  # subjects are kept whole


@given(ROWS, st.integers(1, 7))
def test_shards_do_not_depend_on_the_order_of_rows(rows: list[Row], parts: int) -> None:
    assert [sorted(shard_of(rows, f"{i}/{parts}")) for i in range(1, parts + 1)] == [
        sorted(shard_of(rows[::-1], f"{i}/{parts}")) for i in range(1, parts + 1)
    ]


@pytest.mark.parametrize("shard", ["", "1", "0/2", "3/2", "a/b", "-1/2", "1/0", "1/2/3", "/", "1/", "²/3"])
def test_what_no_shard_is(shard: str) -> None:
    with pytest.raises(ValueError, match=r"must be i/n with 1 <= i <= n, such as 1/4"):
        shard_of([], shard)


# ---- controls


def test_controls_come_along_and_first(catalogue: Catalogue) -> None:
    rows = with_controls(catalogue, select(catalogue, "healthy"))
    assert [r.family for r in rows] == ["must_fail", "must_pass"] + ["healthy"] * 4
    assert with_controls(catalogue, rows) == rows


def test_a_catalogue_without_controls_certifies_nothing(catalogue: Catalogue) -> None:
    rows = select(catalogue, "healthy")
    bare = Catalogue(tuple(z for z in catalogue.zoos if z.name != "controls"), ())
    with pytest.raises(DiscoveryError, match="no zoo is called 'controls'"):
        with_controls(bare, rows)


def test_controls_of_the_modes_that_are_judged_come_along(trains: Catalogue) -> None:
    def controls(*modes: str) -> set[str]:
        rows = [r for r in select(trains, "healthy") if r.mode in modes]
        return {r.family for r in with_controls(trains, rows) if r.zoo == "controls"}

    inference, training = {"must_fail", "must_pass"}, {"must_drop", "must_train"}
    assert controls("inference") == inference
    assert controls("training") == training
    assert controls("inference", "training") == inference | training


def test_training_without_controls_of_training_certifies_nothing(catalogue: Catalogue) -> None:
    rows = [Row("small", "healthy", "detect", "training")]
    with pytest.raises(DiscoveryError, match="the zoo 'controls' declares no row of mode training: a run without must-fail controls"):
        with_controls(catalogue, rows)


def test_controls_are_asked_for_of_the_modes_that_the_engine_judges(catalogue: Catalogue) -> None:
    """A zoo whose controls know no training is screened as before; its training is not judged without any."""
    rows = select(catalogue, "healthy")
    trained = Row("small", "healthy", "detect", "training", Settings(0, 2, "float16"))
    run = Certification(catalogue, [*rows, trained], emulated=screened([*rows, trained]), controls=True)
    assert {(r.zoo, r.mode) for r in run.rows} == {("controls", "inference"), ("small", "inference")}
    with pytest.raises(DiscoveryError, match="declares no row of mode training"):
        Certification(catalogue, [*rows, trained], controls=True)


def test_what_the_emulated_engine_judges(trains: Catalogue) -> None:
    every = trains.select(Selection(zoos=("small",)))

    def kinds(rows: list[Row]) -> set[tuple[str, str]]:
        return {(r.mode, r.arm) for r in rows}

    assert kinds(screened(every)) == {("inference", "graphed")}
    assert kinds(screened(every, modes=("training",))) == {("inference", "graphed"), ("training", "graphed")}  # chosen before
    assert kinds(screened(every, arms=("bare",))) == {("inference", "bare"), ("inference", "graphed")}
    training = [r for r in every if r.mode == "training"]
    assert kinds(screened(training)) == {("training", "graphed")}, "where nothing else was chosen"
    native = [r for r in training if r.arm == "native"]
    assert screened(native) == native
    controls = trains.select(Selection(zoos=("controls",)))
    assert {r.family for r in screened([*controls, *every])} >= {"must_fail", "must_pass"}, "whatever their arm"


# ---- runs


@pytest.mark.parametrize(
    ("families", "survivor", "code"),
    [
        (["healthy"], False, 0),
        (["healthy", "known", "gone"], False, 0),
        (["sabotaged"], False, 1),
        (["better"], False, 1),
        (["healthy"], True, 2),
        (["sabotaged"], True, 2),
    ],
)
def test_exit_codes(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, families: list[str], survivor: bool, code: int) -> None:
    monkeypatch.setattr(FakePool, "survivor", survivor)
    run = Certification(catalogue, with_controls(catalogue, select(catalogue, *families)))
    assert [r["id"] for r in run.run()] == FakePool.judged
    assert run.tally.exit_code == code
    assert {r["family"] for r in run.tally.survived} == ({"must_fail"} if survivor else set())


def test_every_record_is_on_disk_when_it_is_told(catalogue: Catalogue, tmp_path: Path) -> None:
    run = Certification(catalogue, select(catalogue, "healthy"), reports=tmp_path / "reports")
    assert run.path is not None
    for count, told in enumerate(run.run(), 1):
        lines = run.path.read_text().splitlines()
        assert len(lines) == count
        assert told["id"] in lines[-1]
    assert [r["id"] for r in read_evidence(run.path)] == sorted(FakePool.judged)


def test_an_interrupted_run_keeps_and_reports_what_it_has(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePool, "interrupt_after", 2)
    rows = select(catalogue, "healthy")
    run = Certification(catalogue, rows, reports=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(run.run())
    assert run.path is not None
    assert [r["id"] for r in read_evidence(run.path)] == sorted(FakePool.judged)
    assert (tmp_path / "SUPPORT_MATRIX.md").exists()
    monkeypatch.setattr(FakePool, "interrupt_after", -1)
    first = list(FakePool.judged)
    again = Certification(catalogue, rows, reports=tmp_path, resume=True)
    list(again.run())
    assert sorted(FakePool.judged) == sorted(r.id for r in rows)
    assert len(first) == 2
    assert len(again.tally.records) == len(rows)


def test_what_is_on_disk_is_counted_wherever_ctrl_c_falls(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = select(catalogue, "healthy")
    run = Certification(catalogue, rows, reports=tmp_path)
    append = EvidenceFile.append

    def pressed(file: EvidenceFile, record: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)
        append(file, record)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(EvidenceFile, "append", pressed)
    with pytest.raises(KeyboardInterrupt):
        list(run.run())
    assert run.path is not None
    assert [r["id"] for r in run.tally.records] == [r["id"] for r in read_evidence(run.path)] == FakePool.judged[:1]


def test_resuming_judges_stale_rows_again_and_counts_the_others(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = select(catalogue, "healthy", "sabotaged", "gone", "ec")
    monkeypatch.setattr("doors.outcome_of", lambda row, _: Outcome(row.id, "crashed") if row.family == "ec" else outcome_of(row))
    list(Certification(catalogue, rows, reports=tmp_path).run())
    monkeypatch.setattr("doors.outcome_of", outcome_of)
    FakePool.judged.clear()
    run = Certification(catalogue, rows, reports=tmp_path, resume=True)
    list(run.run())
    assert {Row.parse(i).family for i in FakePool.judged} == {"ec"}  # what was not judged is asked again, unless it cannot be judged
    assert run.tally.exit_code == 1  # the sabotaged one is remembered


def test_resuming_one_mode_does_not_wake_the_controls_of_the_other(trains: Catalogue, tmp_path: Path) -> None:
    rows = with_controls(trains, select(trains, "healthy"))
    list(Certification(trains, [r for r in rows if r.id != "small/healthy/detect/training/b2-float16/graphed"], reports=tmp_path).run())
    FakePool.judged.clear()
    list(Certification(trains, rows, reports=tmp_path, resume=True).run())
    assert {Row.parse(i).mode for i in FakePool.judged} == {"training"}
    assert {Row.parse(i).family for i in FakePool.judged} == {"must_drop", "must_train", "healthy"}


def test_training_rows_are_recorded_with_class_and_proof(trains: Catalogue, tmp_path: Path) -> None:
    run = Certification(trains, with_controls(trains, select(trains, "noisy")), reports=tmp_path)
    assert list(run.run())
    assert run.tally.exit_code == 0
    assert run.path is not None
    found = {r["family"]: (r["class"], r["proof"], r["tensors"]) for r in read_evidence(run.path)}
    assert found == {
        "noisy": ("eager_noise", ["cudnn-deterministic", "math-sdpa"], [3, 4]),
        "must_train": ("exact", [], [0, 4]),
        "must_drop": ("", [], [0, 4]),
    }


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"class": "one_ulp", "proof": []}, "of class one_ulp without a proof"),
        ({"class": "nearly", "proof": ["a"]}, "of class 'nearly'"),
        ({}, "of class ''"),
    ],
)
def test_an_outcome_that_is_no_evidence_names_its_row_and_the_command(
    trains: Catalogue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: dict[str, Any], why: str
) -> None:
    row = next(r for r in select(trains, "noisy") if r.settings.dtype == "float16")
    said = Outcome.from_dict(outcome_of(row).to_dict() | {"training": says})
    monkeypatch.setattr("doors.outcome_of", lambda *_: said)
    run = Certification(trains, [row], reports=tmp_path)
    with pytest.raises(RecordError) as caught:
        list(run.run())
    assert str(caught.value).startswith(f"{row.id}: what the judge said of it is no evidence: ")
    assert why in str(caught.value)
    assert str(caught.value).endswith(f"judge it again with: {rerun(row, 'emulated', trains.sources)}")
    assert run.path is not None
    assert read_evidence(run.path) == []


def test_resuming_without_reports_is_refused(catalogue: Catalogue) -> None:
    with pytest.raises(ValueError, match="it does not go with --no-reports"):
        Certification(catalogue, select(catalogue, "healthy"), resume=True)


def test_without_reports_nothing_is_written(catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    list(Certification(catalogue, select(catalogue, "healthy")).run())
    assert [p for p in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(p)] == [p for p in before if "__pycache__" not in str(p)]


def test_shards_leave_reports_to_whoever_joins_them(catalogue: Catalogue, tmp_path: Path) -> None:
    rows = select(catalogue, "healthy")
    for part in ("1/2", "2/2"):
        list(Certification(catalogue, rows, reports=tmp_path, shard=part).run())
    assert sorted(FakePool.judged) == sorted(r.id for r in rows)
    names = sorted(p.name for p in (tmp_path / "evidence").iterdir())
    assert len(names) == 2
    assert all("shard" in name for name in names)
    assert not (tmp_path / "SUPPORT_MATRIX.md").exists()


def test_seconds_of_the_last_run_are_the_hints_of_the_next(catalogue: Catalogue, tmp_path: Path) -> None:
    rows = select(catalogue, "ec")
    run = Certification(catalogue, rows, reports=tmp_path)
    assert run.hints() == {}
    list(run.run())
    assert Certification(catalogue, rows, reports=tmp_path, resume=True).hints() == {rows[0].id: 1.0}


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_goes_on_from_a_line_that_was_cut_off(catalogue: Catalogue, tmp_path: Path, resume: bool) -> None:
    rows = select(catalogue, "ec", "healthy")
    first = Certification(catalogue, rows, reports=tmp_path)
    list(first.run())
    assert first.path is not None
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:-40])
    lost = max(row.id for row in rows)  # the file is sorted
    FakePool.judged.clear()
    run = Certification(catalogue, rows, reports=tmp_path, resume=resume)
    list(run.run())
    assert FakePool.judged == [lost] if resume else lost in FakePool.judged
    assert {r["id"] for r in read_evidence(first.path)} == {row.id for row in rows}
    assert run.notes == [
        f"{first.path}:{len(rows)}: the last line was cut off; moved to {first.path.name}.partial, its row is missing until it runs"
    ]


def test_what_would_keep_the_reports_from_being_written_is_told_before_anything_is_judged(catalogue: Catalogue, tmp_path: Path) -> None:
    rows = select(catalogue, "ec")
    list(Certification(catalogue, rows, reports=tmp_path).run())
    FakePool.judged.clear()
    for folder in ("evidence", "bench"):
        other = tmp_path / folder / "nvidia-old.jsonl"
        other.parent.mkdir(exist_ok=True)
        other.write_text('{"id": "x", "schema": 0}\n')
        with pytest.raises(RecordError, match=rf"{folder}/nvidia-old\.jsonl:1: .*schema 0"):
            list(Certification(catalogue, rows, reports=tmp_path).run())
        list(Certification(catalogue, rows, reports=tmp_path, shard="1/1").run())  # writes no reports
        other.unlink()
    assert len(FakePool.judged) == 2, "only the shards were judged"


def test_what_could_not_be_judged_is_told_with_its_reason(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = "small is not installed: pip install small"
    monkeypatch.setattr("doors.outcome_of", lambda row, survivor=False: Outcome(row.id, "unavailable", message=lacks))
    run = Certification(catalogue, select(catalogue, "ec", "healthy"))
    records = list(run.run())
    assert line(records[0]).startswith(f"unavailable   {records[0]['id']}  {lacks}")
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, run, set())
    assert f"{len(records)} not judged: {lacks}\n" in console.file.getvalue()  # type: ignore[attr-defined]


# ---- explanations


KNOWN = "small/known/detect/inference/b1-float32"
SABOTAGED = "small/sabotaged/detect/inference/b1-float32"


def explained(catalogue: Catalogue, *families: str, **more: Any) -> tuple[Certification, list[list[dict[str, Any]]]]:
    """A run of these families with their controls, and what it tells after all were judged."""
    run = Certification(catalogue, with_controls(catalogue, select(catalogue, *families)), explain=True, **more)
    list(run.run())
    return run, list(run.explanations())


def told_of(run: Certification) -> dict[str, Any]:
    """Of each row on disk that is explained, whether its study ended, by id."""
    assert run.path is not None
    return {r["id"]: r["explanation"]["stopped"] for r in read_evidence(run.path) if "explanation" in r}


def test_each_refused_subject_is_studied_once_and_all_its_refused_arms_are_told(catalogue: Catalogue, tmp_path: Path) -> None:
    run, groups = explained(catalogue, "healthy", "known", "sabotaged", "gone", reports=tmp_path, timeout=7.0)
    assert FakePool.explained == [f"{KNOWN}/eager", f"{SABOTAGED}/eager"], "neither controls nor what is safe"
    assert [sorted(r["arm"] for r in group) for group in groups] == [["bare", "graphed"], ["bare"]]
    judging, studying = FakePool.asked
    assert (judging.judge, studying.judge) == (Options("emulated", ()).judge, STUDY)
    assert (studying.timeout, studying.isolation) == (7.0, "fork")
    assert told_of(run) == dict.fromkeys((f"{KNOWN}/bare", f"{KNOWN}/graphed", f"{SABOTAGED}/bare"), "")
    bare, graphed = (r["explanation"] for r in sorted(groups[0], key=lambda r: str(r["arm"])))
    assert bare == graphed
    assert bare["seam"]["code"].startswith("Seam(pieces=('stem',)")
    assert bare["unseen"][-1] == "the inside of a library"
    assert "75% of the operations" in (tmp_path / "SUPPORT_MATRIX.md").read_text()
    assert {r["id"]: "explanation" in r for r in run.tally.records} == {
        r["id"]: r["zoo"] == "small" and r["verdict"] == "wrong" for r in run.tally.records
    }


def test_nothing_is_studied_unless_it_is_asked_for(catalogue: Catalogue, tmp_path: Path) -> None:
    run = Certification(catalogue, select(catalogue, "sabotaged"), reports=tmp_path)
    list(run.run())
    assert list(run.explanations()) == []
    assert (FakePool.explained, told_of(run)) == ([], {})


@pytest.mark.parametrize(("zoo", "owed"), [("small", True), ("controls", False), ("case", False)])
def test_controls_and_case_files_are_not_explained(catalogue: Catalogue, zoo: str, owed: bool) -> None:
    (row,) = select(catalogue, "sabotaged")
    run = Certification(catalogue, [row], explain=True)
    assert run.owed(record(catalogue, row) | {"zoo": zoo}) == owed


def test_without_reports_the_records_of_the_run_tell_it_all_the_same(catalogue: Catalogue) -> None:
    run, _ = explained(catalogue, "sabotaged")
    assert [r["family"] for r in run.tally.records if "explanation" in r] == ["sabotaged"]


@pytest.mark.parametrize(("family", "code"), [("known", 0), ("sabotaged", 1)])
def test_a_study_that_fails_says_so_and_changes_no_verdict(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, code: int
) -> None:
    monkeypatch.setattr(FakePool, "failing", (family,))
    run, groups = explained(catalogue, family, reports=tmp_path)
    assert run.tally.exit_code == code
    assert {r["verdict"] for r in groups[0]} == {"wrong"}
    assert set(told_of(run).values()) == {"took longer than 300 s"}
    assert "incomplete took longer than 300 s" in in_full(groups[0][0])


def test_where_no_study_can_be_made_a_note_says_so(catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePool, "broken", "the zoo cannot be imported")
    run, groups = explained(catalogue, "known", "sabotaged", reports=tmp_path)
    assert (groups, told_of(run), run.tally.exit_code) == ([], {}, 1)
    assert run.notes == ["2 of 2 refused subjects are not explained: the zoo cannot be imported"]
    assert (tmp_path / "SUPPORT_MATRIX.md").exists()
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, run, set())
    assert f"note: {run.notes[0]}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_interrupted_explanation_keeps_everything_judged_and_resuming_goes_on(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePool, "studies_until", 1)
    with pytest.raises(KeyboardInterrupt):
        explained(catalogue, "known", "sabotaged", reports=tmp_path)
    (path,) = (tmp_path / "evidence").iterdir()
    judged = [r["id"] for r in read_evidence(path)]
    assert judged == sorted(FakePool.judged)
    monkeypatch.setattr(FakePool, "studies_until", -1)
    FakePool.judged.clear()
    run, _ = explained(catalogue, "known", "sabotaged", reports=tmp_path, resume=True)
    assert (FakePool.judged, FakePool.explained) == ([], [f"{KNOWN}/eager", f"{SABOTAGED}/eager"]), "each once, nothing judged again"
    assert [r["id"] for r in read_evidence(path)] == judged
    assert len(told_of(run)) == 3


def test_resuming_explains_what_is_not_and_what_an_older_study_told(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = select(catalogue, "sabotaged")
    list(Certification(catalogue, rows, reports=tmp_path).run())  # as evidence is that was taken without

    def again() -> int:
        FakePool.explained.clear()
        run = Certification(catalogue, rows, reports=tmp_path, resume=True, explain=True)
        list(run.run())
        list(run.explanations())
        return len(FakePool.explained)

    assert [again(), again()] == [1, 0]
    monkeypatch.setattr(certification, "study_fingerprint", lambda: "another")
    assert [again(), again()] == [1, 0]


def test_progress_tells_how_many_are_explained(catalogue: Catalogue) -> None:
    console = Console(file=io.StringIO(), width=200)
    with Progress(console, [], "emulated") as progress:
        progress.explaining(1, 2, SABOTAGED)
    assert console.file.getvalue() == f"explaining 1 of 2: {SABOTAGED}\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("words", "studies"), [((), 1), (("--explain",), 1), (("--no-explain",), 0)])
def test_the_command_explains_unless_it_is_told_not_to(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...],
    studies: int,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["certify", "--families", "small_zoos", "--family", "sabotaged", "--json", *words]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert ("explanation" in found, len(FakePool.explained)) == (bool(studies), studies)


def test_ctrl_c_while_it_explains_says_how_to_go_on(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(FakePool, "studies_until", 0)
    assert main(["certify", "--families", "small_zoos", "--family", "sabotaged"]) == 130
    assert "interrupted: 3 finished rows are kept; `--resume` explains the others" in capfd.readouterr().err


def test_a_refused_row_in_real_children(tmp_path: Path) -> None:
    """Without a fake: one that reads a value, explained with its line, its advice and a cut that was tried."""
    extra = '    family("reads", "reads", "small", arms=("bare", "graphed")),\n'
    catalogue = discover([write_families(tmp_path, "reading_zoos", extra=extra)])
    run = Certification(catalogue, select(catalogue, "reads"), engine="emulated", reports=tmp_path / "reports", explain=True)
    assert {r["verdict"] for r in run.run()} == {"uncapturable"}
    ((one, other),) = run.explanations()
    assert one["explanation"] == other["explanation"]
    told = one["explanation"]
    assert [(r["cause"], r["where"].partition(" ")[2]) for r in told["reasons"]] == [("host-sync", "if x.sum() > 4:")]
    assert told["seam"]["pieces"][0]["path"] == "stem"
    assert told["seam"]["proof"].startswith("bits equal")
    assert told["stopped"] == ""
    assert run.path is not None
    assert [r["explanation"] for r in read_evidence(run.path)] == [told, told]
    matrix = (tmp_path / "reports" / "SUPPORT_MATRIX.md").read_text()
    assert "Python reads a number of the device here" in matrix
    assert "Seam(pieces=('stem',)" in matrix


# ---- words


def test_an_explained_row_says_why_in_its_words(catalogue: Catalogue) -> None:
    _, ((found,),) = explained(catalogue, "sabotaged")
    told = in_full(found)
    without = in_full({name: value for name, value in found.items() if name != "explanation"}).splitlines()
    assert [told.splitlines()[0], *told.splitlines()[-2:]] == [without[0], *without[-2:]]
    assert "cut        Seam(pieces=('stem',)" in told
    assert "first off  call 2 (probe B), in head: aten::mul" in told


def test_the_command_judges_the_row_alone(trains: Catalogue) -> None:
    row = Row("zoo", "yolox", "detect", settings=Settings(640, boundary="whole"), arm="native")
    assert rerun(row, "cuda") == (
        "parity certify --zoo zoo --family yolox --task detect --mode inference --arm native --size 640 --boundary whole --engine cuda"
    )
    trained = Row("zoo", "fomo", "point", "training", Settings(96, 2, "bfloat16"), "graphed")
    assert rerun(trained, "cuda") == (
        "parity certify --zoo zoo --family fomo --task point --mode training --arm graphed --dtype bfloat16 --size 96 --engine cuda"
    )
    every = trains.select(Selection())
    assert {row.mode for row in every} == {"inference", "training"}
    for one in every:
        options = dict(zip(*[iter(shlex.split(rerun(one, "cuda"))[2:])] * 2, strict=True))
        named = [tuple(filter(None, [options.get(f"--{name}")])) for name in ("zoo", "family", "task", "mode", "arm", "dtype")]
        chosen = Selection(*named[:5], size=options.get("--size", "recommended"), dtypes=named[5])
        assert trains.select(chosen) == [one]


def test_the_command_names_a_case_file_and_a_folder_that_is_not_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, there, case = str(tmp_path / "families"), str(tmp_path / "my zoos"), str(tmp_path / "mine.py")
    row = Row("zoo", "f", "t", arm="bare")
    assert rerun(row, "cuda", [here]) == "parity certify --zoo zoo --family f --task t --mode inference --arm bare --engine cuda"
    assert rerun(row, "cuda", [there, "entry-points"]).endswith(f"--arm bare --families '{there}' --engine cuda")
    judged = Row("case", "mine", "inference", arm="bare")
    assert rerun(judged, "cuda", [here, case]) == f"parity certify {case} --arm bare --engine cuda"
    trained = Row("case", "mine", "training", "training", arm="bare")
    assert rerun(trained, "cuda", [here, case]) == f"parity certify {case} --arm bare --dtype float32 --engine cuda"


def test_an_explanation_says_why_where_how_again_and_what_to_do(catalogue: Catalogue) -> None:
    (row,) = select(catalogue, "sabotaged")
    told = in_full(record(catalogue, row))
    assert told.splitlines() == [
        "small/sabotaged/detect/inference/b1-float32/bare is wrong (python-counter), expected screened",
        "  check      replay: call B: output: 4 of 4 elements",
        "  line       _models.py:20 return x * self.calls",
        "  again      parity certify --zoo small --family sabotaged --task detect --mode inference --arm bare --engine emulated",
        "  settle     mend the model, or, if it is right and known, declare it in the family: "
        'expected={"bare": (Expect("wrong", "why, for a stranger", "python-counter"),)}',
    ]


def test_the_declaration_it_proposes_is_one_and_makes_the_row_expected(catalogue: Catalogue) -> None:
    (row,) = select(catalogue, "sabotaged")
    proposed = in_full(record(catalogue, row)).rpartition("expected=")[2]
    (expect,) = eval(proposed, {"Expect": Expect})["bare"]
    assert as_expected(verdict(record(catalogue, row)), expect)


@pytest.mark.parametrize(("status", "cure"), [("timed_out", "--timeout"), ("out_of_memory", "--slots 1"), ("crashed", "alone")])
def test_of_a_child_that_never_told_a_verdict_no_declaration_is_proposed(catalogue: Catalogue, status: str, cure: str) -> None:
    (row,) = select(catalogue, "sabotaged")
    told = in_full(record(catalogue, row) | {"verdict": status, "cause": "unknown"})
    assert cure in told.splitlines()[-1]
    assert "Expect(" not in told


def test_what_an_explained_row_tells_stands_there_once(catalogue: Catalogue, tmp_path: Path) -> None:
    _, groups = explained(catalogue, "sabotaged", reports=tmp_path)
    told = in_full(groups[0][0])
    assert told.count("_models.py:20") == 2, "its line, and where it went off first"
    assert told.count("call B: output: 4 of 4 elements") == 1
    assert "cannot be seen here" not in told, "as long as all the rest, and the same for every row"


def test_a_run_of_which_nothing_could_be_judged_is_void(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = lambda row, survivor=False: Outcome(row.id, "unavailable", message="not installed")  # noqa: E731
    monkeypatch.setattr("doors.outcome_of", lambda row, survivor=False: (lacks if row.zoo == "small" else outcome_of)(row))

    def exit_code(*families: str) -> int:
        run = Certification(catalogue, with_controls(catalogue, select(catalogue, *families)))
        list(run.run())
        console = Console(file=io.StringIO(), width=200)
        print_summary(console, run, set())
        assert ("This run is void: nothing that was asked for" in console.file.getvalue()) == (run.tally.exit_code == 2)  # type: ignore[attr-defined]
        return run.tally.exit_code

    assert exit_code("healthy") == 2
    assert exit_code("gone") == 0, "declared"
    assert exit_code("healthy", "gone") == 0, "what is declared says that somebody knows"
    monkeypatch.setattr("doors.outcome_of", outcome_of)
    assert exit_code("healthy") == 0


def test_a_log_tells_of_controls_only_where_they_fail_or_are_asked_for(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    def log(rows: Sequence[Row]) -> list[str]:
        console = Console(file=io.StringIO(), width=200)
        with Progress(console, rows, "emulated") as progress:
            for one in Certification(catalogue, rows).run():
                progress.advance(one)
        return [text.split()[1].split("/")[1] for text in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]

    rows = with_controls(catalogue, select(catalogue, "ec"))
    controls = [row for row in rows if row.zoo == "controls"]
    assert log(rows) == ["ec"]
    assert sorted(log(controls)) == ["must_fail", "must_pass"]
    monkeypatch.setattr(FakePool, "survivor", True)
    assert sorted(log(rows)) == ["ec", "must_fail"]


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_summary_breaks_no_verdict(trains: Catalogue, width: int) -> None:
    run = Certification(trains, trains.select(Selection(modes=("training",))), controls=True)
    list(run.run())
    console = Console(file=io.StringIO(), width=width)
    print_summary(console, run, set())
    lines = [text.split("│")[5].strip() for text in console.file.getvalue().splitlines() if text.startswith("│")]  # type: ignore[attr-defined]
    told = [text for text in lines if text]
    assert "3 screened (eager_noise)" in told
    assert all(re.fullmatch(r"\d+ \w+( \(\w+\))?", text) for text in told), told


def test_a_screened_run_says_what_it_left_out_and_how_to_ask_for_it(trains: Catalogue) -> None:
    rows = select(trains, "healthy")
    assert left_out(rows, rows) == ""
    left = len(rows) - len(judged := screened(rows))
    assert left_out(rows, judged) == f"{left} rows; --arm bare, --mode training would judge them"
    run = Certification(trains, rows, emulated=judged)
    list(run.run())
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, run, set())
    assert f"left out without a GPU: {run.left}\n" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_case_file_is_not_told_to_declare_what_it_cannot(catalogue: Catalogue) -> None:
    of_family = record(catalogue, select(catalogue, "sabotaged")[0])
    assert "declare it in the family" in in_full(of_family)
    told = in_full(of_family | {"zoo": "case"})
    assert told.endswith("settle     mend the model: a case file declares no expectation")
    assert "--timeout SECONDS" in in_full(of_family | {"zoo": "case", "verdict": "timed_out"})


def test_an_unexpectedly_better_row_says_which_line_to_take_out(catalogue: Catalogue) -> None:
    (row,) = select(catalogue, "better")
    told = in_full(record(catalogue, row))
    assert "is screened (no cause needed), expected wrong (scales every result by a Python counter)" in told
    assert "take the expectation for arm 'bare' out of the family's declaration" in told


def test_a_line_marks_what_was_not_expected(catalogue: Catalogue) -> None:
    (sabotaged,), known = select(catalogue, "sabotaged"), select(catalogue, "known")[0]
    assert line(record(catalogue, sabotaged)).endswith("(expected screened)")
    assert "(expected" not in line(record(catalogue, known))
    assert line(record(catalogue, known)).split()[:3] == ["wrong", known.id, "python-counter"]


def test_a_line_and_an_explanation_of_training_tell_class_cause_and_proof(trains: Catalogue) -> None:
    noisy = next(r for r in select(trains, "noisy") if r.settings.dtype == "bfloat16")
    told = line(record(trains, noisy))
    assert told == f"screened (eager_noise) {noisy.id}  nondeterministic-kernel  proved by cudnn-deterministic, math-sdpa"
    (unproven,) = select(trains, "unproven")
    assert line(record(trains, unproven)) == f"unproven      {unproven.id}  unknown  (expected screened)"
    lines = in_full(record(trains, unproven)).splitlines()
    assert lines[0] == f"{unproven.id} is unproven (unknown), expected screened"
    assert lines[3] == (
        "  again      parity certify --zoo small --family unproven --task detect --mode training --arm graphed --dtype float32 "
        "--engine emulated"
    )
