"""On a device the same looks are taken without a capture: they tell what the device was seen to refuse, and where to cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.judge.explain.divergence import hashed
from parity.judge.explain.study import study
from parity.judge.subject import Bench
from parity.rows.discovery import Catalogue, discover
from parity.rows.row import Row
from parity.runtime.engine import engine

from .test_explain_seams import Counts, TwoStages, deep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CORPUS = Path(__file__).parents[1] / "corpus"
TRUTH = [json.loads(line) for line in (CORPUS / "truth_h200.jsonl").read_text(encoding="utf-8").splitlines()]
REFUSED = {t["id"]: t["expect_cause"] for t in TRUTH if t["mode"] == "inference" and t["class"] == "capture-fails"}
HEALTHY = [t["id"] for t in TRUTH if t["mode"] == "inference" and t["observed"] == "certified"]


@pytest.fixture(scope="module")
def cases() -> Catalogue:
    return discover(sorted((CORPUS / "cases").glob("*.py")))


def looked(catalogue: Catalogue, row: Row) -> dict[str, Any]:
    with torch.no_grad():
        return study(Bench(row, catalogue.family(row), engine("cuda"), 0))


@pytest.mark.parametrize("name", REFUSED)
def test_an_eager_look_tells_what_the_device_refuses(name: str, cases: Catalogue) -> None:
    found = looked(cases, Row("case", name, "inference", arm="eager"))
    assert found["reasons"][0]["cause"] == REFUSED[name], found["reasons"]
    assert f"{name}.py:" in found["reasons"][0]["where"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_case_has_no_reason_and_does_not_diverge(name: str, cases: Catalogue) -> None:
    found = looked(cases, Row("case", name, "inference", arm="eager"))
    assert (found["reasons"], found["divergence"], found["finding"]) == ([], {}, {})


def test_the_kernel_of_a_wrong_stream_is_named(cases: Catalogue) -> None:
    found = looked(cases, Row("case", "deform_conv_default_stream", "inference", arm="eager"))
    assert [r["cause"] for r in found["reasons"]] == ["side-stream"]
    assert "deformable_im2col_kernel" in found["reasons"][0]["what"]


def test_a_cut_holds_on_the_device() -> None:
    from .judging import catalogue_of, subject

    row = Row("zoo", "family", "task", arm="eager")
    found = looked(catalogue_of(lambda settings: subject(TwoStages())), row)
    assert [p["path"] for p in found["seam"]["pieces"]] == ["encode", "last"]
    assert found["seam"]["proof"] == "bits equal"
    found = looked(catalogue_of(lambda settings: subject(torch.nn.Sequential(deep(), Counts(), deep()))), row)
    assert (found["divergence"]["module"], found["finding"]["cause"]) == ("1", "python-counter")


def test_the_hash_is_the_same_on_both_sides() -> None:
    x = torch.randn(1000)
    assert hashed(x).item() == hashed(x.cuda()).item()


def test_a_training_cut_is_tried_on_the_device() -> None:
    from .test_explain_trial import Counts, Reads, deep, learned, paths

    seam = learned(lambda: Reads(deep(6)), on="cuda")
    assert (paths(seam), seam["proof"]) == (["stem", "middle"], "bits equal")
    seam = learned(lambda: Reads(Counts()), on="cuda")
    assert (paths(seam), seam["proof"]) == (["stem", "middle.layers"], "bits equal")
