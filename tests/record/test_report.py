"""The matrix of a small run, word by word; what a summary tells; and the files that `write_reports` leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.judge.outcome import CAUSES
from parity.record.advice import ADVICE
from parity.record.evidence import evidence_path
from parity.record.files import RecordError
from parity.record.line import mark_healed
from parity.record.report import MATRIX, code, support_matrix, table, write_reports, write_summary
from parity.runtime.allowlist import FILE, Allowlist

from .records import CPU, CPU_NAME, H200, H200_NAME, YOLO9, failing, family, record, small_matrix, write

GOLDEN = Path(__file__).with_name("golden_matrix.md")


def emulated():
    stale = failing("churn", "stale-address", "nn.py:201 x")
    return mark_healed([record("bare", stale, of=YOLO9, engine="emulated"), record(of=YOLO9, engine="emulated")])


def test_the_matrix_word_by_word():
    control = record("graphed", of=family("counter", "control", zoo="controls"))
    text = support_matrix({H200_NAME: [*mark_healed(small_matrix()), control], CPU_NAME: emulated()})
    assert text == GOLDEN.read_text()


def _section(text: str, start: str, end: str = "\n## ") -> str:
    return text.partition(start)[2].partition(end)[0]


def test_emulated_evidence_is_marked_and_certifies_nothing():
    text = support_matrix({CPU_NAME: emulated()})
    assert "Nothing is certified" in _section(text, "## Certified")
    assert "screened" in _section(text, "## Emulated: screened, not certified")
    assert "**Emulated: screened, not certified.**" in write_summary(emulated())
    assert "Emulated" not in write_summary(small_matrix())


def test_tasks_stand_in_the_order_of_the_mission():
    named = {"x": "zoom", "a": "pose", "b": "detect", "c": "segment", "d": "detect"}
    text = support_matrix({H200_NAME: [record(of=family(name, task)) for name, task in named.items()]})
    lines = [line for line in _section(text, "## Certified").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[1:] == [["detect", "b, d"], ["segment", "c"], ["pose", "a"], ["zoom", "x"]]


def test_a_family_certified_on_some_environments_only_says_where():
    b200 = H200 | {"gpu": "NVIDIA B200", "arch": "sm100"}
    name = "nvidia-b200-sm100-torch2.11.0-cu130"
    both = {H200_NAME: [record()], name: [record(environment=b200), record(of=family("z"), environment=b200)]}
    assert f"yolox, z (only {name})" in support_matrix(both)


def test_an_unexpected_verdict_stands_out():
    entry = record("native", failing("replay", "rng"))
    assert "**wrong**, declared certified" in support_matrix({H200_NAME: [entry]})
    summary = write_summary([entry, record()])
    assert "2 rows, 1 not as declared." in summary
    assert f"`{entry['id']}`" in _section(summary, "1 not as declared.", "**libreyolo**")
    assert "0 not as declared" in write_summary(small_matrix())
    assert write_summary([]) == "No row has evidence.\n"


def test_a_training_class_stands_beside_its_verdict():
    assert "certified (one_ulp)" in support_matrix({H200_NAME: [record() | {"class": "one_ulp"}]})


def test_vacuous_rows_and_leaves():
    vacuous = record("bare", failing("input_dependence", "dead-input"), dead_leaves=("logits",))
    text = support_matrix({H200_NAME: [vacuous]})
    assert "**Vacuous**: no output depends on the input" in text
    assert "**Vacuous leaves**" not in text
    assert "scale (1 of 2)" in support_matrix({H200_NAME: small_matrix()})


def test_every_cause_has_its_advice():
    assert set(ADVICE) == set(CAUSES)


def test_what_is_healed_is_not_among_the_refused():
    text = support_matrix({H200_NAME: mark_healed(small_matrix())})
    assert "yolo9" in _section(text, "**Healed**", "**Refused**")
    assert "yolo9" not in _section(text, "**Refused**", "**Vacuous")
    assert "bare, graphed, native" in _section(text, "**Refused**", "**Vacuous"), "arms that agree are told once"


@given(st.text(), st.text())
def test_a_cell_never_breaks_its_table(one, other):
    lines = table([{"a": one, "b": code(other)}, {"a": "x", "b": "y"}]).split("\n")
    assert len(lines) == 4
    for line in lines:
        assert line.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize(("text", "marked"), [("a", "`a`"), ("a`b", "`` a`b ``"), ("``", "``` `` ```"), ("", ""), ("a|b", "`a|b`")])
def test_code(text, marked):
    assert code(text) == marked


def _reports(folder: Path) -> Path:
    write(evidence_path(folder, H200, "cuda"), *small_matrix())
    write(evidence_path(folder, CPU, "emulated"), *emulated())
    return folder


def test_reports_are_rebuilt_from_files_alone_and_are_the_same_each_time(tmp_path):
    paths = write_reports(_reports(tmp_path))
    assert [path.name for path in paths] == [FILE, MATRIX]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_reports(tmp_path)] == first
    assert len(Allowlist.load(paths[0]).certificates) == 3
    assert "**Healed**" in paths[1].read_text(), "healed is drawn even if the run was killed before it closed its file"


def test_bad_evidence_or_a_full_disk_keeps_the_old_reports(tmp_path, monkeypatch):
    paths = write_reports(_reports(tmp_path))
    before = [path.read_bytes() for path in paths]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(RecordError, match="the disk is full"):
            write_reports(tmp_path)
    evidence = evidence_path(tmp_path, H200, "cuda")
    with evidence.open("a") as file:
        file.write("{}\n")
    with pytest.raises(RecordError, match=r"\.jsonl:12: "):
        write_reports(tmp_path)
    assert [path.read_bytes() for path in paths] == before
