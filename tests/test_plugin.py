"""The pytest door, in a pytest of its own beside a small zoo, as a zoo's maintainer has it: ``pytest parity/``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doors import CASE, ROOT, write_families

from parity.record.evidence import read_all

CONFTEST = """
pytest_plugins = ["parity.plugin"]
"""
FAKED = (
    CONFTEST
    + """
import doors
doors.patch_in()
"""
)
Run = subprocess.CompletedProcess


def prepare(folder: Path, conftest: str, training: bool = False) -> None:
    write_families(folder, training=training)
    (folder / "parity").symlink_to(ROOT / "parity")
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers --strict-config -p no:cacheprovider\nfilterwarnings = error\n"
    )


def pytest_(folder: Path, *words: str) -> Run[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}:{ROOT / 'tests'}",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "240",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "parity/", *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose pool knows its verdicts."""
    folder = tmp_path_factory.mktemp("zoo")
    prepare(folder, FAKED)
    return folder


def results(run: Run[str]) -> dict[str, str]:
    """Row id to what became of its test, from ``-v``."""
    return dict(re.findall(r"::test_row\[(\S+)\] (\w+)", run.stdout))


def test_everything_selected_is_tested_and_each_outcome_is_told(zoo: Path) -> None:
    """One run of the whole small zoo: passes, an undeclared fault, a stale declaration, and what is not installed."""
    run = pytest_(zoo, "-v", "-rs", "--zoo", "small")
    told = results(run)
    assert run.returncode == 1, run.stdout + run.stderr
    assert len(told) == 2 + 2 + 1 + 2 + 1 + 1 + 2
    expected = {"sabotaged": "FAILED", "better": "FAILED", "gone": "SKIPPED"}
    assert told == {row: expected.get(row.split("/")[1], "PASSED") for row in told}
    # the message of the fault: what, where, and the command that shows it again
    assert "small/sabotaged/detect/inference/b1-float32/bare is wrong (python-counter), expected screened" in run.stdout
    assert re.search(r"  line +_models\.py:20\n +return x \* self\.calls", run.stdout)
    assert "again      parity certify --zoo small --family sabotaged --task detect --mode inference --arm bare" in run.stdout
    # the declaration that does not hold any more, and how to change it
    assert "is screened (no cause needed), expected wrong (scales every result by a Python counter)" in run.stdout
    assert "take the expectation for arm 'bare' out of the family's declaration" in run.stdout
    # the reason of a skip, the engine, and no traceback of ours
    assert "its weights need the network" in run.stdout
    assert "emulated engine: rows are screened, not certified" in run.stdout
    assert "Traceback" not in run.stdout
    assert "plugin.py:" not in run.stdout


def test_a_refused_row_tells_why_and_where_to_cut(zoo: Path) -> None:
    """In the message of the one that is not declared; of the one that is, and passes, in its output."""
    run = pytest_(zoo, "-v", "-rP", "--family", "known", "--family", "sabotaged", "--arm", "bare")
    assert results(run) == {
        "small/known/detect/inference/b1-float32/bare": "PASSED",
        "small/sabotaged/detect/inference/b1-float32/bare": "FAILED",
    }
    failed, _, passed = run.stdout.partition("= PASSES =")
    for text, family in ((failed, "sabotaged"), (passed, "known")):
        assert f"small/{family}/detect/inference/b1-float32/bare" in text
        assert "check      replay: call B: output: 4 of 4 elements" in text
        assert "cut        Seam(pieces=('stem',), reason='it counts')" in text
    for word in ("--no-explain", "--maxfail=2"):
        without = pytest_(zoo, "-v", "-rP", "--family", "known", "--family", "sabotaged", "--arm", "bare", word)
        assert results(without) == results(run)
        assert "Seam(" not in without.stdout


def test_k_takes_substrings_and_family_is_exact(zoo: Path) -> None:
    substring = results(pytest_(zoo, "-v", "--zoo", "small", "-k", "ec and not sabotaged and not better and not gone"))
    exact = results(pytest_(zoo, "-v", "--family", "ec"))
    assert {row.split("/")[1] for row in substring} > {"ec"}  # every 'detect' too
    assert exact == {"small/ec/detect/inference/b1-float32/graphed": "PASSED"}


def test_a_test_file_of_the_zoos_own_may_import_the_matrix(zoo: Path) -> None:
    (zoo / "test_parity_of_small.py").write_text("from parity.test_matrix import test_row\n\n\ndef test_other():\n    pass\n")
    run = pytest_(zoo, "test_parity_of_small.py", "-v", "-k", "healthy and pose or other", "--ignore=parity")
    assert run.returncode == 0, run.stdout + run.stderr
    assert set(results(run)) == {f"small/healthy/pose/inference/b1-float32/{arm}" for arm in ("bare", "graphed")}
    assert "test_parity_of_small.py::test_other PASSED" in run.stdout


def test_k_with_a_family_name(zoo: Path) -> None:
    run = pytest_(zoo, "-v", "-k", "healthy and pose")
    assert run.returncode == 0
    assert set(results(run)) == {f"small/healthy/pose/inference/b1-float32/{arm}" for arm in ("bare", "graphed")}


def test_zoos_tasks_and_arms_are_markers(zoo: Path) -> None:
    run = pytest_(zoo, "-v", "-m", "small and pose and bare")
    assert set(results(run)) == {"small/healthy/pose/inference/b1-float32/bare"}


def test_options_narrow_alike(zoo: Path) -> None:
    run = pytest_(
        zoo, "--collect-only", "-q", "--zoo", "small", "--task", "pose", "--arm", "graphed", "--mode", "inference", "--size", "all"
    )
    assert run.returncode == 0
    assert run.stdout.splitlines()[0] == "parity/test_matrix.py::test_row[small/healthy/pose/inference/b1-float32/graphed]"


@pytest.fixture(scope="module")
def trains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with rows of training."""
    folder = tmp_path_factory.mktemp("trains")
    prepare(folder, FAKED, training=True)
    return folder


def test_training_is_screened_beside_inference_only_where_it_is_asked_for(trains: Path) -> None:
    words = ("-v", "-rs", "--family", "healthy", "--arm", "graphed", "--task", "detect", "--dtype", "float32")
    inference, training = (f"small/healthy/detect/{settings}/graphed" for settings in ("inference/b1-float32", "training/b2-float32"))
    run = pytest_(trains, *words)
    assert results(run) == {inference: "PASSED", training: "SKIPPED"}
    assert "training is screened where `--mode training` asks for it too" in run.stdout
    assert results(pytest_(trains, *words, "--mode", "training", "--mode", "inference")) == {inference: "PASSED", training: "PASSED"}


def test_training_rows_have_their_id_a_marker_and_options(trains: Path) -> None:
    run = pytest_(trains, "-v", "-m", "training and graphed and small", "--dtype", "float16", "--dtype", "float32")
    assert results(run) == {
        "small/healthy/detect/training/b2-float16/graphed": "PASSED",
        "small/healthy/detect/training/b2-float32/graphed": "PASSED",
        "small/noisy/detect/training/b2-float16/graphed": "PASSED",
        "small/noisy/detect/training/b2-float32/graphed": "PASSED",
        "small/unproven/detect/training/b2-float32/graphed": "FAILED",
    }
    assert run.returncode == 1
    assert "is unproven (unknown), expected screened" in run.stdout
    assert (
        "again      parity certify --zoo small --family unproven --task detect --mode training --arm graphed --dtype float32"
        in run.stdout
    )
    run = pytest_(trains, "--collect-only", "-q", "--mode", "training", "--family", "healthy", "--arm", "native")
    assert re.findall(r"test_row\[(\S+)\]", run.stdout) == [
        f"small/healthy/detect/training/b2-{dtype}/native" for dtype in ("float16", "bfloat16", "float32")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dtype", "half"), "no dtype is called 'half'; near: "),
        (("--family", "healthi"), "no family is called 'healthi'; near: healthy"),
        (("--zoo", "smal"), "no zoo is called 'smal'; near: small"),
        (("--zoo", "small", "--task", "sabotaged"), "no row answers to"),
        (("--families", "nowhere"), "nowhere: no such folder of families"),
        (("--engine", "tpu"), "invalid choice: 'tpu'"),
    ],
)
def test_a_wrong_name_is_a_usage_error(zoo: Path, words: tuple[str, ...], message: str) -> None:
    run = pytest_(zoo, *words)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in run.stderr + run.stdout
    assert "INTERNALERROR" not in run.stderr + run.stdout
    assert "passed" not in run.stdout


def test_a_selection_that_leaves_nothing_fails(zoo: Path) -> None:
    assert pytest_(zoo, "-k", "no_such_name").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_demanded_device_is_a_sentence_not_a_traceback(zoo: Path) -> None:
    run = pytest_(zoo, "--family", "ec", "--engine", "cuda")
    assert run.returncode == 2
    assert "parity: the engine cuda was demanded, but torch finds no device" in run.stdout + run.stderr
    assert "plugin.py" not in run.stdout + run.stderr


def test_a_surviving_control_voids_the_run(tmp_path: Path) -> None:
    """Even where every selected row is as declared, and none of them is a control."""
    prepare(tmp_path, FAKED)
    (tmp_path / "survivor").write_text("yes")
    run = pytest_(tmp_path, "-v", "--family", "ec")
    assert results(run) == {"small/ec/detect/inference/b1-float32/graphed": "PASSED"}
    assert run.returncode == 2
    assert "a control did not do what it must, this run is void: controls/must_fail" in run.stdout


def test_a_survivor_in_real_children_and_evidence_on_demand(tmp_path: Path) -> None:
    """Without a fake: rows judged in children on the emulated engine. One healthy, one sabotaged, one case file."""
    prepare(tmp_path, CONFTEST)
    (tmp_path / "mine.py").write_text(CASE)
    words = ("-v", "--engine", "emulated", "--families", "families", "--families", "mine.py", "--reports", "out", "--arm", "bare")
    run = pytest_(
        tmp_path, *words, "--family", "healthy", "--family", "sabotaged", "--family", "mine", "--task", "detect", "--task", "inference"
    )
    told = results(run)
    assert run.returncode == 1, run.stdout + run.stderr
    assert told == {
        "small/healthy/detect/inference/b1-float32/bare": "PASSED",
        "small/sabotaged/detect/inference/b1-float32/bare": "FAILED",
        "case/mine/inference/inference/b1-float32/bare": "FAILED",
    }
    assert f"again      parity certify {tmp_path / 'mine.py'} --arm bare --engine emulated" in run.stdout
    (records,) = read_all(tmp_path / "out").values()
    assert {r["id"] for r in records} >= set(told)
    assert {r["family"] for r in records if "explanation" in r} == {"sabotaged"}, "neither a control nor a case file"
    assert "in the model itself: aten::mul at " in run.stdout, "the study of the undeclared one"
