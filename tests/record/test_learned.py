"""The explanation that a refused row's evidence may hold: made of a study, checked when read, told by the reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from parity.judge.outcome import Check, Outcome
from parity.record.evidence import read_evidence
from parity.record.explanation import explanation, recorded, render
from parity.record.junit import render_junit
from parity.record.learned import UNSEEN, check_learned, learned
from parity.record.line import Record, outcome_of, validate
from parity.record.report import support_matrix, write_summary

from .records import H200_NAME, PPYOLOE, failing, record, write

LINE = "libreyolo/models/ppyoloe/nn.py:577 torch.cat(anchors).to(device)"
REASON = {"cause": "h2d-copy", "what": "Tensor.to the device", "where": LINE, "module": "head", "count": 2}
PIECE = {"path": "backbone", "operations": 0.8, "seconds": 0.7, "calls": 1}
SEAM = {
    "model": "PPYOLOE", "code": "Seam(pieces=('backbone', 'neck'), reason='h2d-copy')", "pieces": [PIECE, PIECE | {"path": "neck"}],
    "proof": "bits equal", "dropped": [], "operations": 0.913, "seconds": 0.87,
}  # fmt: skip
FIGURES: dict[str, Any] = {"reasons": [REASON], "finding": {}, "divergence": {}, "seam": SEAM, "stopped": "", "unseen": ["a ``` fence"]}
MODELS = "libreyolo/ppyoloe/detect/inference/64px-b1-float32"


def study(**figures: Any) -> Outcome:
    return Outcome(f"{MODELS}/eager", "judged", (Check("study", "passed", figures=FIGURES | figures),))


def refused(arm: str = "bare", where: str = LINE, **figures: Any) -> Record:
    entry = record(arm, failing("capture", "h2d-copy", where), of=PPYOLOE, captures=0, replays=0)
    return entry | {"explanation": learned(study(**figures), "cuda") | {"study": "abc"}}


def test_what_is_learned_is_plain_data_and_says_what_an_engine_cannot_see() -> None:
    found = learned(study(), "cuda")
    assert json.loads(json.dumps(found)) == found
    assert found["reasons"][0]["advice"].startswith("a host tensor is moved in every forward")
    assert found["unseen"] == ["the inside of a ``` fence"]
    assert learned(study(), "emulated")["unseen"] == [*UNSEEN, "the inside of a ``` fence"]


@pytest.mark.parametrize(
    ("outcome", "stopped"),
    [
        (Outcome("x", "crashed", message="the child died of SIGSEGV"), "the child died of SIGSEGV"),
        (Outcome("x", "judged"), "the study says nothing"),
        (study(stopped="the forward raised ValueError"), "the forward raised ValueError"),
        (study(), ""),
    ],
)
def test_a_study_that_failed_says_so(outcome: Outcome, stopped: str) -> None:
    assert learned(outcome, "cuda")["stopped"] == stopped


def test_evidence_holds_it_and_old_evidence_goes_without(tmp_path: Path) -> None:
    old = {name: value for name, value in refused("native").items() if name != "explanation"}
    path = write(tmp_path / "x.jsonl", refused(), old)
    assert ["explanation" in r for r in read_evidence(path)] == [True, False]
    assert read_evidence(path)[0] == refused() | {"recorded": read_evidence(path)[0]["recorded"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(explanation=[]), r"explanation is list '\[\]'"),
        (lambda r: r["explanation"].pop("seam"), "explanation says nothing readable of seam"),
        (lambda r: r["explanation"].update(study=3, unseen=""), "explanation says nothing readable of unseen, study"),
        (lambda r: r["explanation"]["reasons"].append("x"), "a reason is str 'x'"),
        (lambda r: r["explanation"]["reasons"][0].update(count=True), "a reason says nothing readable of count"),
        (lambda r: r["explanation"].update(divergence={"call": 1}), "divergence says nothing readable of probe, piece, module"),
        (lambda r: r["explanation"]["seam"].update(operations="most"), "seam says nothing readable of operations"),
        (lambda r: r["explanation"]["seam"]["pieces"].append({}), "a piece of the seam says nothing readable of path"),
    ],
)
def test_what_is_no_explanation_is_no_evidence(change: Callable[[Record], Any], words: str) -> None:
    entry = json.loads(json.dumps(refused()))
    validate(entry)
    change(entry)
    with pytest.raises(ValueError, match=words):
        validate(entry)


def test_a_safe_row_has_none() -> None:
    entry = record()
    check_learned(entry)
    with pytest.raises(ValueError, match="certified, but with an explanation: only uncapturable and wrong rows have one"):
        validate(entry | {"explanation": refused()["explanation"]})


def test_a_row_that_was_not_judged_says_why_and_nothing_else() -> None:
    lacks = Outcome(f"{MODELS}/bare", "unavailable", message="libreyolo is not installed: pip install libreyolo")
    told = explanation(lacks.row, "emulated", [lacks], Outcome(f"{MODELS}/eager", "unavailable", message=lacks.message), {"bare": None})
    assert render(told).splitlines() == [f"{lacks.row}: unavailable, on the emulated engine", lacks.message]
    assert told["advice"] == ""


def test_a_record_tells_what_the_command_tells() -> None:
    bare, native = refused(), refused("native")
    expect = {arm: PPYOLOE.expected[arm][0] for arm in ("bare", "native")}
    asked = explanation(bare["id"], "cuda", [outcome_of(bare), outcome_of(native)], study(), expect)
    assert recorded(bare, [bare, native]) == asked
    assert "beside it  native: uncapturable (h2d-copy)" in render(asked)


@pytest.mark.parametrize(
    ("proof", "told"),
    [
        ("bits equal", "; captured and replayed: bits equal\n"),
        ("eager differs from itself: not proved", "; captured and replayed: eager differs from itself: not proved\n"),
        ("not tried: 50 s were not enough", "% of the time; not tried: 50 s were not enough\n"),
    ],
)
def test_the_text_says_what_came_of_the_cut(proof: str, told: str) -> None:
    text = render(recorded(refused(seam=SEAM | {"proof": proof, "dropped": ["neck.0: refused: a rule"]})))
    assert told in text
    assert "\n  not        neck.0: refused: a rule\n" in text


# --- the matrix


def _matrix(*records: Record) -> str:
    return support_matrix({H200_NAME: [r | {"healed": {}} for r in records]}).partition("**Refused**")[2].partition("\n## ")[0]


def test_the_table_is_short_and_the_whole_is_folded() -> None:
    text = _matrix(*(refused(arm) for arm in ("bare", "graphed", "native")))
    row = next(line for line in text.splitlines() if MODELS in line)
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert cells[1:5] == ["bare, graphed, native", "uncapturable", "h2d-copy", f"`{LINE}`"]
    assert cells[6].startswith("a host tensor is moved in every forward")
    assert cells[7] == "`backbone`, `neck`: 91% of the operations, bits equal"
    assert "<summary>Why they are refused, in full (1)</summary>\n\n````text\n" in text, "a fence that no line of it closes"
    assert text.count("````") == 2
    assert text.rstrip().endswith("</details>")
    assert "Seam(pieces=('backbone', 'neck')" in text


def test_where_the_verdict_has_no_line_the_first_reason_gives_it() -> None:
    assert f"`{LINE}`" in _matrix(refused(where=""))


@pytest.mark.parametrize(("paths", "cell"), [("abc", "`a`, `b`, `c`: 91%"), ("abcde", "`a`, `b`, `c` and 2 more: 91%")])
def test_the_table_names_a_few_pieces(paths: str, cell: str) -> None:
    assert f"| {cell} of the operations" in _matrix(refused(seam=SEAM | {"pieces": [PIECE | {"path": path} for path in paths]}))


def test_where_nothing_can_be_cut_the_table_says_why() -> None:
    none = SEAM | {"pieces": [], "code": "", "proof": "none is proposed: the line that goes wrong is not known"}
    assert "| none is proposed: the line that goes wrong is not known" in _matrix(refused(seam=none))


def test_without_a_study_there_is_no_column_and_nothing_folded() -> None:
    entry = {name: value for name, value in refused().items() if name != "explanation"}
    text = _matrix(entry)
    assert MODELS in text
    assert "<details>" not in text
    assert " cut " not in text
    both = _matrix(entry, refused("native", where="x.py:1 y"))
    assert " cut " in both
    assert "in full (1)" in both


def test_a_summary_of_a_job_has_it_too() -> None:
    assert "91% of the operations" in write_summary([refused()])


# --- JUnit


def test_a_refused_row_has_it_as_its_output_whether_declared_or_not() -> None:
    cases = ElementTree.fromstring(render_junit([refused(), refused("native") | {"expected": "certified"}, record()]).encode())[0]
    told = {case.get("name"): case.findtext("system-out") for case in cases}
    assert told[f"{MODELS}/bare"] == render(recorded(refused()))
    assert "Seam(pieces=('backbone', 'neck')" in str(told[f"{MODELS}/native"])
    assert told[record()["id"]] is None
