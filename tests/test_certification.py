"""One certification run, whichever door it came through: shards, controls, what counts as expected, and the words."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doors import FakePool, fake_probe, outcome_of, write_families
from hypothesis import given
from hypothesis import strategies as st

from parity import certification
from parity.certification import Certification, explanation, groups_of, line, rerun, shard_of, with_controls
from parity.record.evidence import read_evidence
from parity.record.line import record_of
from parity.rows.discovery import Catalogue, DiscoveryError, Selection, discover
from parity.rows.row import ARMS, Row, Settings

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
    monkeypatch.setattr(FakePool, "judged", [])
    yield discover([write_families(tmp_path, "small_zoos")])
    for name in [n for n in sys.modules if n.split(".")[0] == "small_zoos"]:
        del sys.modules[name]


def select(catalogue: Catalogue, *families: str) -> list[Row]:
    return catalogue.select(Selection(families=families))


def record(catalogue: Catalogue, row: Row) -> dict[str, Any]:
    return record_of(outcome_of(row), row, catalogue.family(row), "emulated", "1.0", rerun(row, "emulated"))


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


def test_resuming_judges_stale_rows_again_and_counts_the_others(catalogue: Catalogue, tmp_path: Path) -> None:
    rows = select(catalogue, "healthy", "sabotaged", "gone")
    list(Certification(catalogue, rows, reports=tmp_path).run())
    FakePool.judged.clear()
    run = Certification(catalogue, rows, reports=tmp_path, resume=True)
    list(run.run())
    assert {Row.parse(i).family for i in FakePool.judged} == {"gone"}  # what was not judged is asked again
    assert run.tally.exit_code == 1  # the sabotaged one is remembered


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
    assert run.hints() == {rows[0].id: 1.0}


# ---- words


def test_the_command_judges_the_row_alone(catalogue: Catalogue) -> None:
    row = Row("zoo", "yolox", "detect", settings=Settings(640, boundary="whole"), arm="native")
    words = shlex.split(rerun(row, "cuda"))
    assert (
        " ".join(words)
        == "parity certify --zoo zoo --family yolox --task detect --arm native --size 640 --boundary whole --engine cuda"
    )
    for one in catalogue.select(Selection()):
        options = dict(zip(*[iter(shlex.split(rerun(one, "cuda"))[2:])] * 2, strict=True))
        chosen = Selection(
            (options["--zoo"],),
            (options["--family"],),
            (options["--task"],),
            (),
            (options["--arm"],),
            options.get("--size", "recommended"),
        )
        assert catalogue.select(chosen) == [one]


def test_the_command_names_a_case_file_and_a_folder_that_is_not_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, there, case = str(tmp_path / "families"), str(tmp_path / "my zoos"), str(tmp_path / "mine.py")
    row = Row("zoo", "f", "t", arm="bare")
    assert rerun(row, "cuda", [here]) == "parity certify --zoo zoo --family f --task t --arm bare --engine cuda"
    assert rerun(row, "cuda", [there, "entry-points"]).endswith(f"--arm bare --families '{there}' --engine cuda")
    judged = Row("case", "mine", "inference", arm="bare")
    assert rerun(judged, "cuda", [here, case]) == f"parity certify {case} --arm bare --engine cuda"


def test_an_explanation_says_why_where_how_again_and_what_to_do(catalogue: Catalogue) -> None:
    (row,) = select(catalogue, "sabotaged")
    told = explanation(record(catalogue, row))
    assert told.splitlines() == [
        "small/sabotaged/detect/inference/b1-float32/bare is wrong (python-counter), expected screened",
        "  check:   replay: call B: output: 4 of 4 elements",
        "  where:   _models.py:20 return x * self.calls",
        "  again:   parity certify --zoo small --family sabotaged --task detect --arm bare --engine emulated",
        "  If this verdict is right and known, declare it with a reason in the family's `expected`.",
    ]


def test_an_unexpectedly_better_row_says_which_line_to_take_out(catalogue: Catalogue) -> None:
    (row,) = select(catalogue, "better")
    told = explanation(record(catalogue, row))
    assert "is screened (no cause needed), expected wrong (scales every result by a Python counter)" in told
    assert "take the expectation for arm 'bare' out of the family's declaration" in told


def test_a_line_marks_what_was_not_expected(catalogue: Catalogue) -> None:
    (sabotaged,), known = select(catalogue, "sabotaged"), select(catalogue, "known")[0]
    assert line(record(catalogue, sabotaged)).endswith("(expected screened)")
    assert "(expected" not in line(record(catalogue, known))
    assert line(record(catalogue, known)).split()[:3] == ["wrong", known.id, "python-counter"]
