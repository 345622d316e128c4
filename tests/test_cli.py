"""The command line, in this process with a pool that knows its verdicts, and for what matters end to end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doors import CASE, ROOT, FakePool, fake_probe, write_families

from parity import certification
from parity.cli import main, sources_of
from parity.record.evidence import read_all
from parity.runtime.allowlist import FILE

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Runs a command in a folder with a small zoo: exit code, stdout, stderr."""
    monkeypatch.setattr(certification, "Pool", FakePool)
    monkeypatch.setattr(certification, "probe", fake_probe)
    monkeypatch.setattr(FakePool, "judged", [])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    write_families(tmp_path, "small_zoos")
    write_families(tmp_path, "trained_zoos", training=True)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        told = capfd.readouterr()
        return code, told.out, told.err

    def with_families(command: str, *words: str) -> tuple[int, str, str]:
        return run(command, *words) if "--families" in words else run(command, "--families", "small_zoos", *words)

    yield with_families
    for name in [n for n in sys.modules if n.split(".")[0] in ("small_zoos", "trained_zoos")]:
        del sys.modules[name]


DEVICE = {"gpu": "NVIDIA H200", "arch": "sm90", "torch": "2.11.0", "cuda": "13.0", "zoos": {"small": {"zoo": "1.0"}}}


@pytest.fixture
def device(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes find a GPU."""
    monkeypatch.setattr(certification, "probe", lambda *_: {"engine": "cuda", "devices": ["0"], "environment": DEVICE})


def files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in str(p)}


# ---- list


def test_list_names_rows_and_what_is_expected_of_them(cli: Cli) -> None:
    code, out, _ = cli("list", "--zoo", "small", "--family", "known", "--family", "gone", "--arm", "bare")
    assert code == 0
    assert out.splitlines() == [
        "small/known/detect/inference/b1-float32/bare  wrong/python-counter: scales every result by a Python counter",
        "small/gone/detect/inference/b1-float32/bare  unavailable: its weights need the network",
    ]
    code, out, _ = cli("list", "--family", "ec", "--json")
    assert json.loads(out) == [{"expected": "", "id": "small/ec/detect/inference/b1-float32/graphed"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--family", "e"), "parity: no family is called 'e'; near: "),
        (("--zoo", "smal"), "parity: no zoo is called 'smal'; near: small"),
        (("--zoo", "controls", "--family", "ec"), "parity: no row answers to"),
        (("--arm", "graph"), "parity: no arm is called 'graph'; near: graphed"),
    ],
)
@pytest.mark.parametrize("command", ["list", "certify"])
def test_a_wrong_name_is_one_sentence_and_exit_2(cli: Cli, command: str, words: tuple[str, ...], message: str) -> None:
    code, out, err = cli(command, *words)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1


def test_bad_arguments_are_exit_2(cli: Cli) -> None:
    assert cli("certify", "--no-such-option")[0] == 2
    assert cli("certify", "--shard", "3/2")[0] == 2
    assert cli("certify", "families")[0] == 2
    code, _, err = cli("certify", "healthy")
    assert (code, err) == (2, "parity: healthy: not a case file (*.py); families are named with --family\n")
    code, _, err = cli("certify", "--no-reports", "--resume")
    assert code == 2
    assert "does not go with --no-reports" in err


def test_families_come_from_the_folder_here_or_from_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sources_of([]) == ["entry-points"]
    (tmp_path / "families").mkdir()
    assert sources_of([]) == ["families", "entry-points:controls"]
    assert sources_of(["mine"], ["case.py"]) == ["mine", "entry-points:controls", "case.py"]


# ---- certify


@pytest.mark.parametrize(
    ("family", "survivor", "code"), [("healthy", False, 0), ("sabotaged", False, 1), ("better", False, 1), ("healthy", True, 2)]
)
def test_certify_exit_codes(cli: Cli, monkeypatch: pytest.MonkeyPatch, family: str, survivor: bool, code: int) -> None:
    monkeypatch.setattr(FakePool, "survivor", survivor)
    found, _, err = cli("certify", "--family", family)
    assert found == code
    assert ("This run is void: controls that must do otherwise: must_fail" in err) == survivor
    assert ("  again      parity certify --zoo" in err) == (code > 0)
    assert "screened, not certified" in err


def test_certify_records_and_reports(cli: Cli, tmp_path: Path) -> None:
    cli("certify", "--family", "healthy")
    (records,) = read_all(tmp_path / "reports").values()
    assert {r["family"] for r in records} == {"healthy", "must_fail", "must_pass"}
    assert {p.name for p in (tmp_path / "reports").iterdir()} == {"evidence", "SUPPORT_MATRIX.md", "SUPPORTS_CUDA_GRAPH.json"}


def test_json_holds_what_was_asked_for_and_nothing_else(cli: Cli) -> None:
    code, out, _ = cli("certify", "--family", "healthy", "--task", "detect", "--arm", "bare", "--arm", "graphed", "--json")
    records = json.loads(out)
    assert code == 0
    assert [r["id"] for r in records] == [f"small/healthy/detect/inference/b1-float32/{arm}" for arm in ("bare", "graphed")]
    needed = "id zoo family task mode arm engine settings verdict expected cause where checks "
    needed += "probes seconds peak_memory seed environment command"
    assert set(needed.split()) <= set(records[0])


def test_no_reports_leaves_the_folder_untouched(cli: Cli, tmp_path: Path) -> None:
    cli("certify", "--family", "healthy")
    before = files(tmp_path)
    code, out, _ = cli("certify", "--family", "sabotaged", "--no-reports", "--json")
    assert code == 1
    assert json.loads(out)
    assert files(tmp_path) == before


def test_resume_runs_only_what_is_missing(cli: Cli) -> None:
    cli("certify", "--family", "healthy", "--task", "pose")
    FakePool.judged.clear()
    code, _, _ = cli("certify", "--family", "healthy", "--resume")
    assert code == 0
    judged = [i for i in FakePool.judged if not i.startswith("controls/")]
    assert judged == ["small/healthy/detect/inference/b1-float32/graphed"]
    assert len(FakePool.judged) > len(judged), "whatever is judged is judged beside the controls"
    FakePool.judged.clear()
    assert cli("certify", "--family", "healthy", "--resume")[0] == 0
    assert FakePool.judged == []


def test_only_the_graphed_arm_is_screened_unless_others_are_named(cli: Cli) -> None:
    def arms(*words: str) -> set[str]:
        return {r["arm"] for r in json.loads(cli("certify", "--family", "healthy", "--no-reports", "--json", *words)[1])}

    assert arms() == {"graphed"}
    assert arms("--arm", "bare", "--arm", "graphed") == {"bare", "graphed"}


def test_shards_are_joined_to_what_one_run_gives(cli: Cli, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for part in ("1/2", "2/2"):
        assert cli("certify", "--family", "healthy", "--family", "ec", "--shard", part)[0] == 0
    shards = sorted((tmp_path / "reports" / "evidence").glob("*shard*"))
    assert main(["report", *[w for s in shards for w in ("--merge", str(s))], "--reports", "joined"]) == 0
    capfd.readouterr()
    cli("certify", "--family", "healthy", "--family", "ec", "--reports", "whole")
    (joined,), (whole,) = read_all(tmp_path / "joined").values(), read_all(tmp_path / "whole").values()
    assert [r["id"] for r in joined] == [r["id"] for r in whole]


def test_a_device_that_is_not_there_is_exit_2_and_one_sentence(cli: Cli) -> None:
    code, _, err = cli("certify", "--engine", "cuda")
    assert code == 2
    assert err.startswith("parity: the engine cuda was demanded, but torch finds no device")


def test_interrupted_is_exit_130_with_the_way_on(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePool, "interrupt_after", 3)
    code, _, err = cli("certify", "--family", "healthy")
    assert code == 130
    assert "interrupted: 3 finished rows are kept; `--resume` runs the others" in err
    (records,) = read_all(tmp_path / "reports").values()
    assert len(records) == 3


@pytest.mark.parametrize("fault", [lambda: int("x"), lambda: Path("/nowhere/at/all").read_text()], ids=["ValueError", "OSError"])
def test_a_fault_of_ours_is_no_verdict_and_shows_where(cli: Cli, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], Any]) -> None:
    monkeypatch.setattr(FakePool, "run", lambda self, *_, **__: iter([fault()]))
    code, _, err = cli("certify")
    assert code == 2
    assert "Traceback" in err
    assert "a fault of parity itself" in err
    code, _, err = cli("certify", "--shard", "5/4")
    assert (code, "Traceback" in err) == (2, False)


def test_the_eager_arm_is_not_in_anybodys_way(cli: Cli) -> None:
    code, out, _ = cli("certify", "--family", "healthy", "--arm", "eager", "--json", "--no-reports")
    assert code == 0  # the fake pool lets everything pass; the judge does not
    assert [r["arm"] for r in json.loads(out)] == ["eager", "eager"]


# ---- training

TRAINED = ("--families", "trained_zoos")


def judged(cli: Cli, *words: str) -> list[dict[str, Any]]:
    """The records of a run over the zoo that trains."""
    code, out, err = cli("certify", *TRAINED, "--no-reports", "--json", *words)
    assert code in (0, 1), err
    records: list[dict[str, Any]] = json.loads(out)
    return records


def test_training_is_listed_and_chosen_by_mode_and_dtype(cli: Cli) -> None:
    _, out, _ = cli("list", *TRAINED, "--family", "healthy", "--mode", "training", "--dtype", "float16", "--dtype", "float32")
    assert [line.strip() for line in out.splitlines()] == [
        f"small/healthy/detect/training/b2-{dtype}/{arm}" for dtype in ("float16", "float32") for arm in ("graphed", "native")
    ]
    _, out, _ = cli("list", *TRAINED, "--zoo", "controls", "--mode", "training", "--json")
    assert {entry["id"].split("/")[1]: entry["expected"] for entry in json.loads(out)} == {
        "must_drop": "wrong/python-counter: scales every result by a Python counter",
        "must_train": "",
    }
    code, _, err = cli("list", *TRAINED, "--dtype", "fp16")
    assert (code, len(err.splitlines())) == (2, 1)
    assert err.startswith("parity: no dtype is called 'fp16'; near: ")


def test_training_is_screened_only_where_it_is_asked_for(cli: Cli) -> None:
    def kinds(*words: str) -> set[tuple[str, str]]:
        return {(r["mode"], r["arm"]) for r in judged(cli, "--family", "healthy", "--task", "detect", *words)}

    assert kinds() == {("inference", "graphed")}
    assert not [row for row in FakePool.judged if "/training/" in row], "nor are its controls"
    assert kinds("--mode", "training") == {("training", "graphed")}
    assert kinds("--mode", "training", "--mode", "inference") == {("inference", "graphed"), ("training", "graphed")}
    assert kinds("--mode", "training", "--arm", "native") == {("training", "native")}
    _, out, _ = cli("certify", "--help")
    assert "the mode is inference unless --mode names training" in " ".join(out.split())


@pytest.mark.usefixtures("device")
def test_on_a_gpu_both_modes_are_judged(cli: Cli) -> None:
    records = judged(cli, "--family", "healthy", "--task", "detect")
    assert {(r["mode"], r["arm"]) for r in records} == {
        ("inference", "bare"), ("inference", "graphed"), ("training", "graphed"), ("training", "native"),
    }  # fmt: skip
    assert {r["verdict"] for r in records} == {"certified"}
    assert {row.split("/")[1] for row in FakePool.judged if row.startswith("controls/")} == {
        "must_fail", "must_pass", "must_drop", "must_train",
    }  # fmt: skip


def test_records_of_training_carry_class_and_proof_and_the_command(cli: Cli) -> None:
    (found,) = judged(cli, "--family", "noisy", "--mode", "training", "--dtype", "bfloat16")
    assert (found["class"], found["proof"], found["tensors"]) == ("eager_noise", ["cudnn-deterministic", "math-sdpa"], [3, 4])
    assert found["training"]["cause"] == "nondeterministic-kernel"
    assert "--mode training --arm graphed --dtype bfloat16" in found["command"]
    (plain,) = judged(cli, "--family", "ec")
    assert not {"class", "proof", "tensors", "training"} & set(plain)


def test_a_summary_tells_classes_and_a_failure_its_command(cli: Cli) -> None:
    code, _, err = cli("certify", *TRAINED, "--family", "noisy", "--family", "unproven", "--mode", "training", "--no-reports")
    assert code == 1
    table = [line.split("│")[5].strip() for line in err.splitlines() if line.startswith("│")]
    assert table == ["1 wrong", "1 screened (exact)", "3 screened (eager_noise)", "1 unproven"]
    assert "screened (eager_noise) small/noisy/detect/training/b2-float16/graphed  nondeterministic-kernel  proved by " in err
    assert "small/unproven/detect/training/b2-float32/graphed is unproven (unknown), expected screened" in err
    assert "again      parity certify --zoo small --family unproven --task detect --mode training --arm graphed --dtype float32" in err


def test_a_surviving_control_of_training_voids_the_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doors.COUNTING", ())
    code, _, err = cli("certify", *TRAINED, "--family", "noisy", "--mode", "training", "--no-reports")
    assert code == 2
    assert "This run is void: controls that must do otherwise: must_drop" in err


@pytest.mark.usefixtures("device")
def test_gate_and_diff_of_training(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed evidence of a GPU, then a run whose noise needs another condition."""
    chosen = (*TRAINED, "--family", "noisy", "--mode", "training")
    assert cli("certify", *chosen)[0] == 0
    assert cli("gate", *chosen)[0] == 0
    monkeypatch.setattr("doors.NOISE", ("cudnn-deterministic", "tf32-off"))
    assert cli("certify", *chosen, "--reports", "fresh")[0] == 0, "the verdicts are as declared"
    held = ("--reports", "fresh", "--allowlist", "reports/SUPPORTS_CUDA_GRAPH.json", "--json")
    code, out, _ = cli("gate", *chosen, *held)
    findings = json.loads(out)
    assert (code, {f["kind"] for f in findings}) == (1, {"weaker proof"})
    assert {f["row"].split("/")[4] for f in findings} == {"b2-float16", "b2-bfloat16", "b2-float32"}
    code, out, _ = cli("gate", *chosen, "--dtype", "float16", *held)
    assert {f["row"].split("/")[4] for f in json.loads(out)} == {"b2-float16"}
    (old,), (new,) = ((tmp_path / name / "evidence").glob("*.jsonl") for name in ("reports", "fresh"))
    assert main(["diff", str(old), str(new)]) == 1


# ---- end to end


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "parity", *words], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_whole_run_with_a_case_file(tmp_path: Path) -> None:
    """Real children on the emulated engine: a case of one's own beside the controls, ``bare`` first, nothing written."""
    write_families(tmp_path)
    (tmp_path / "mine.py").write_text(CASE)
    before = files(tmp_path)
    process = start(tmp_path, "certify", "mine.py", "--json", "--engine", "emulated")
    out, err = process.communicate(timeout=120)
    records: list[dict[str, Any]] = json.loads(out)
    assert process.returncode == 1, err
    assert [r["id"] for r in records] == [f"case/mine/inference/inference/b1-float32/{arm}" for arm in ("bare", "graphed")]
    assert {(r["verdict"], r["cause"], r["check"]) for r in records} == {("wrong", "python-counter", "replay")}
    assert records[0]["where"].startswith("mine.py:8 ")
    assert records[0]["engine"] == "emulated"
    assert "controls" in err, "in the table: they did what they must"
    assert files(tmp_path) == before


def test_a_training_row_in_a_real_child(tmp_path: Path) -> None:
    """Judged on the emulated engine, recorded, and read back."""
    write_families(tmp_path, training=True)
    words = ("--zoo", "controls", "--family", "must_train", "--mode", "training", "--dtype", "float32")
    process = start(tmp_path, "certify", *words, "--json", "--engine", "emulated")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (record,) = json.loads(out)
    assert record["id"] == "controls/must_train/healthy/training/b2-float32/graphed"
    assert (record["verdict"], record["class"], record["proof"]) == ("screened", "exact", [])
    assert record["tensors"] == [0, 4]
    assert all(check["status"] == "passed" for check in record["checks"])
    (records,) = read_all(tmp_path / "reports").values()
    assert records == [record]
    assert "screened (exact)" in (tmp_path / "reports" / "SUPPORT_MATRIX.md").read_text()


def test_ctrl_c_keeps_what_was_finished_and_leaves_no_process(tmp_path: Path) -> None:
    write_families(tmp_path, extra='family("waits", "waits", "small", arms=("bare",)),')
    process = start(tmp_path, "certify", "--family", "ec", "--family", "waits", "--engine", "emulated", "--slots", "2")
    evidence = tmp_path / "reports" / "evidence"
    deadline = time.monotonic() + 90
    while sum(p.read_text().count("\n") for p in evidence.glob("*.jsonl")) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted: 3 finished rows are kept" in err
    (records,) = read_all(tmp_path / "reports").values()
    assert {r["family"] for r in records} == {"ec", "must_fail", "must_pass"}
    assert (tmp_path / "reports" / "SUPPORT_MATRIX.md").exists()
    mark = str(tmp_path / "families")
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(p)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_demanded_device_is_looked_for(tmp_path: Path) -> None:
    write_families(tmp_path)
    process = start(tmp_path, "certify", "--engine", "cuda")
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines() == [
        "parity: the engine cuda was demanded, but torch finds no device; see CUDA_VISIBLE_DEVICES and nvidia-smi"
    ]
    assert not (tmp_path / "reports").exists()


# ---- gate


def _findings(cli: Cli, *words: str) -> tuple[int, set[tuple[str, str]]]:
    code, out, _ = cli("gate", *words, "--json")
    return code, {(f["kind"], f["row"]) for f in json.loads(out)}


@pytest.mark.usefixtures("device")
def test_the_gate_wants_the_controls_beside_what_was_chosen(cli: Cli, tmp_path: Path) -> None:
    chosen = ("--family", "healthy", "--arm", "graphed")
    cli("certify", *chosen)
    (evidence,) = (tmp_path / "reports" / "evidence").glob("*.jsonl")
    assert _findings(cli, str(evidence), *chosen) == (0, set())
    lines = evidence.read_text().splitlines(keepends=True)
    evidence.write_text("".join(line for line in lines if json.loads(line)["family"] != "must_fail"))
    code, found = _findings(cli, str(evidence), *chosen)
    assert code == 1
    assert {(kind, row.split("/")[1]) for kind, row in found} == {("missing row", "must_fail")}


def test_emulated_evidence_is_told_only_that_it_has_no_baseline(cli: Cli, tmp_path: Path) -> None:
    cli("certify", "--family", "healthy", "--arm", "graphed")
    (evidence,) = (tmp_path / "reports" / "evidence").glob("*.jsonl")
    code, out, _ = cli("gate", str(evidence))
    assert code == 2
    first, command, count = out.splitlines()
    assert first.startswith("no baseline: emulated-cpu-torch2.14.1: ")
    assert command.strip() == "parity certify --engine cuda --families small_zoos"
    assert count == "1 finding in 1 environment"


@pytest.mark.usefixtures("device")
def test_what_the_gate_tells_to_type_writes_where_the_gate_looked(cli: Cli, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cli("certify", "--family", "healthy", "--reports", "fresh")
    cli("certify", "--family", "ec", "--reports", "held")
    chosen = ("--zoo", "small", "--mode", "inference", "--reports", "fresh", "--allowlist", f"held/{FILE}")
    code, out, _ = cli("gate", *chosen)
    assert code == 1
    commands = [line.strip() for line in out.splitlines() if line.startswith("    ")]
    again, update = "--families small_zoos --reports fresh", "parity report --reports held --merge fresh/evidence/"
    assert all(c.endswith(again) or c.startswith(update) for c in commands), commands
    assert not (tmp_path / "reports").exists()
    for command in commands:
        main(shlex.split(command.partition("  #")[0])[1:])
    capfd.readouterr()
    assert not (tmp_path / "reports").exists()
    assert _findings(cli, *chosen) == (0, set())


def test_a_gate_without_evidence_is_exit_2(cli: Cli) -> None:
    cli("certify", "--family", "healthy")
    code, out, _ = cli("gate", "--family", "healthy")
    assert code == 2
    assert "`parity certify --engine cuda --families small_zoos` records it" in out


@pytest.mark.usefixtures("device")
def test_the_gate_of_everything_misses_a_family_that_is_declared_no_more(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody would judge it again, and the runtime would go on replaying it."""
    cli("certify", "--zoo", "small", "--mode", "inference", "--no-explain")
    assert main(["gate", "--families", "small_zoos", "--zoo", "small", "--mode", "inference", "--json"]) == 0
    small = tmp_path / "small_zoos" / "small.py"
    small.write_text(small.read_text().replace('    family("ec", "plain", "small", arms=("graphed",)),\n', ""))
    for name in [n for n in sys.modules if n.split(".")[0] == "small_zoos"]:
        del sys.modules[name]
    monkeypatch.setattr("parity.cli.sources_of", lambda named: ["small_zoos"])
    capfd.readouterr()
    for words, code in (((), 1), (("--zoo", "small", "--mode", "inference"), 0)):
        assert main(["gate", *words, "--json"]) == code
        gone = [f["row"] for f in json.loads(capfd.readouterr().out) if "no row of it is declared" in f["message"]]
        assert gone == ["small/ec/detect/inference"] * (not words)
