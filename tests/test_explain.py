"""``parity explain``: targets, what is missing in them, the answer as text and as data, exit codes. The last runs use real children."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from doors import CASE, outcome_of, write_families

from parity import certification
from parity import explain as door
from parity.cli import main
from parity.explain import BadTarget, answer, explain, target_of
from parity.judge.outcome import CAUSES, Check, Outcome
from parity.record.advice import ADVICE, SPECIFIC, advise, spoken
from parity.record.explanation import explanation, place, render
from parity.rows.discovery import DiscoveryError
from parity.rows.row import Row
from parity.run.isolate import Options

ID = "small/known/detect/inference/b1-float32/bare"
READS = """
import torch
MODE = "inference"
class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    def forward(self, x):
        y = self.stem(x)
        if y.sum() > 4:
            y = -y
        return y * torch.tensor(2.0, device=x.device)
def build():
    return Reads()
def probes(device):
    return (torch.rand(1, 8).to(device),), (torch.randn(1, 8).to(device),)
"""


def reason(cause: str = "python-counter", where: str = "_models.py:20 return x * self.calls", **more: Any) -> dict[str, Any]:
    return {"cause": cause, "what": "aten::mul", "where": where, "module": "head", "count": 1, **more}


def studied(row: str, **figures: Any) -> Outcome:
    return Outcome(row, "judged", (Check("study", "passed", figures=figures),))


class FakePool:
    """Knows the verdicts of the small zoo, and a study. ``asked``: what it was made with."""

    asked: list[Options] = []  # noqa: RUF012
    figures: Mapping[str, Any] = {}

    def __init__(self, options: Options, warming: Any = None) -> None:
        self.asked.append(options)

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, groups: Sequence[Sequence[Row]], hints: Any = None, suspects: Iterable[str] = ()) -> Iterator[Outcome]:
        for row in [row for group in groups for row in group]:
            yield studied(row.id, **self.figures) if row.arm == "eager" else outcome_of(row)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_families(tmp_path_factory.mktemp("zoo"), "explained_families"))


@pytest.fixture
def small(families: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in; ``told`` and ``run`` know the small zoo."""
    monkeypatch.setattr(door, "usual_sources", lambda named: [families])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(certification, "Pool", FakePool)
    monkeypatch.setattr(door, "warming", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(FakePool, "asked", [])
    monkeypatch.setattr(FakePool, "figures", {"reasons": [reason()]})
    return tmp_path


def told(target: str, folder: Path, *inputs: str) -> dict[str, Any]:
    return answer(target_of(target, inputs, [], folder), "emulated")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command alone, with the exits of the command line."""
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(explain)
    code = 0
    try:
        app(args=list(arguments))
    except SystemExit as done:
        code = int(done.code or 0)
    except (DiscoveryError, ValueError) as error:
        code, text = 2, str(error)
        return code, capsys.readouterr().out, text
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---------------------------------------------------------------- targets
@pytest.mark.parametrize(
    ("target", "inputs", "words"),
    [
        ("nonsense", (), "the right forms: a row's id"),
        ("small/none/detect/inference/b1-float32/bare", (), "small/known/detect"),
        ("small/known/detect/inference/b7-float32/bare", (), "its family declares small/known/detect/inference/b1-float32/bare"),
        ("none.py", (), "no such case file"),
        ("bad.py", (), "needs build, probes; the right form"),
        ("case.py", ("1x8",), "--input is for package.module:factory"),
        (ID, ("1x8",), "--input is for package.module:factory"),
        ("torch.nn:Linear", (), "give one --input per argument, such as --input 1x3x224x224"),
        ("torch.nn:Linear", ("1,8",), "--input '1,8': sizes joined by x"),
        ("torch.nn:Linear", ("",), "--input '': sizes joined by x"),
    ],
)
def test_a_bad_target_is_told_with_the_right_form(target: str, inputs: tuple[str, ...], words: str, small: Path) -> None:
    Path("bad.py").write_text('MODE = "inference"\n')
    Path("case.py").write_text(CASE)
    with pytest.raises((BadTarget, DiscoveryError), match="(?s)" + words.replace("(", r"\(")):
        target_of(target, inputs, [], small)


def test_a_row_is_judged_on_its_own_arm_and_studied(small: Path) -> None:
    found = target_of(ID, (), [], small)
    assert [row.id for row in found.rows] == [ID]
    assert told(ID, small)["verdict"] == "wrong"
    assert FakePool.asked[0].judge == "parity.judge.explain.study:judge"


def test_a_case_is_judged_on_both_arms_bare_first(small: Path) -> None:
    Path("counts.py").write_text(CASE)
    assert [row.arm for row in target_of("counts.py", (), [], small).rows] == ["bare", "graphed"]


def test_a_factory_becomes_a_case(small: Path) -> None:
    found = target_of("torch.nn:Identity", ["1x8", "2x3:int64"], [], small)
    text = (small / "torch_nn_Identity.py").read_text()
    assert "build_from('torch.nn:Identity')" in text
    assert "probes_from(['1x8', '2x3:int64'], device)" in text
    assert found.ours


# ---------------------------------------------------------------- the answer
def test_the_answer_names_verdict_cause_line_and_submodule(small: Path) -> None:
    found = told(ID, small)
    wanted = {"verdict": "wrong", "cause": "python-counter", "file": "_models.py", "line": 20, "code": "return x * self.calls",
              "op": "aten::mul", "module": "head", "expected": True, "engine": "emulated", "id": ID}  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    assert found["advice"] == ADVICE["python-counter"]
    assert any("workspaces on a cold stream" in text for text in found["unseen"])


def test_a_reason_of_another_line_is_not_the_verdicts(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePool, "figures", {"reasons": [reason(where="other.py:1 x"), reason("host-sync")]})
    found = told(ID, small)
    assert (found["op"], found["module"], len(found["reasons"])) == ("", "", 2)


def test_where_the_verdict_has_no_line_the_study_gives_one() -> None:
    row = Row.parse(ID)
    judged = Outcome(ID, "judged", (Check("replay", "failed", "bits differ", "stale-address"),))
    divergence = {"call": 3, "probe": "A", "piece": "head", "module": "head", "operation": "aten::mul", "where": "m.py:3 y"}
    study = studied(row.with_arm("eager").id, divergence=divergence, finding={})
    found = explanation("x", "cuda", [judged], study, {"bare": None})
    assert (found["where"], found["op"], found["module"], found["expected"]) == ("m.py:3 y", "aten::mul", "head", False)
    assert found["unseen"] == [], "a device sees"
    assert "call 3 (probe A), in head: aten::mul at m.py:3 y" in render(found)


def test_every_dropped_attribute_is_named() -> None:
    stale = ["head.anchors (1, 2, 84) float32, made at nn.py:1", "head.strides (1, 84) float32, made at nn.py:2"]
    judged = Outcome(ID, "judged", (Check("interleave", "failed", "bits differ", "stale-address", "nn.py:1 x", {"stale": stale}),))
    found = explanation("x", "emulated", [judged], studied(ID), {"bare": None})
    assert found["stale"] == stale
    assert all(f"dropped    {text}" in render(found) for text in stale)


def test_the_class_and_proof_of_a_training_row_are_told() -> None:
    row = "small/known/detect/training/b1-float32/bare"
    training = {"class": "float_rounding", "proof": ["autocast-cache-off"], "cause": "autocast-cache"}
    judged = Outcome(row, "judged", tuple(Check(n, "passed") for n in ("capture", "proof", "gradients", "replay")), training=training)
    found = explanation("x", "emulated", [judged], studied(row), {"bare": None})
    assert (found["class"], found["proved"], found["proof"]) == ("float_rounding", "autocast-cache", ["autocast-cache-off"])
    assert "class      float_rounding (autocast-cache), proved by autocast-cache-off" in render(found)
    assert ADVICE["autocast-cache"] in render(found)


def test_what_was_tried_is_told_of_a_step_that_is_wrong() -> None:
    row = "small/known/detect/training/b1-float32/bare"
    tried = [{"conditions": [], "differing": 6}, {"conditions": ["tf32-off", "math-sdpa"], "differing": -1}]
    check = Check("gradients", "failed", "gradient w: 1 of 1 elements", "unknown")
    found = explanation("x", "emulated", [Outcome(row, "judged", (check,), training={"tried": tried})], studied(row), {"bare": None})
    assert found["tried"] == tried
    assert "tried      tensors differ under no condition (6), tf32-off + math-sdpa (some)" in render(found)


@pytest.mark.parametrize(
    ("cause", "detail", "words"),
    [
        ("dead-input", "the loss is nan in eager already", "the step is not finite before anything is captured"),
        ("dead-input", "gradient b: 1; eager gives no gradient where this arm gives one", "the loss does not use this parameter"),
        ("buffer-drift", "a forward writes to parameter t in place", "make it a buffer"),
    ],
)
def test_advice_fits_what_the_check_says(cause: str, detail: str, words: str) -> None:
    judged = Outcome(ID, "judged", (Check("eager_step", "failed", detail, cause),))
    assert words in explanation("x", "emulated", [judged], studied(ID), {"bare": None})["advice"]
    assert words not in ADVICE[cause]


def test_a_study_that_died_is_told_and_the_verdict_stays() -> None:
    dead = Outcome(Row.parse(ID).with_arm("eager").id, "crashed", message="the child died of SIGSEGV")
    found = explanation("x", "emulated", [outcome_of(Row.parse(ID))], dead, {"bare": None})
    assert (found["verdict"], found["stopped"]) == ("wrong", "the child died of SIGSEGV")
    assert "incomplete the child died of SIGSEGV" in render(found)


@pytest.mark.parametrize(
    ("where", "parts"),
    [
        ("a/b.py:12 x = 1", ("a/b.py", 12, "x = 1")),
        ("", ("", 0, "")),
        ("no line here", ("", 0, "no line here")),
        ("c:x.py:3 y", ("c:x.py", 3, "y")),
        ("my case.py:3 x[0:1 ]", ("my case.py", 3, "x[0:1 ]")),
        ("<string>:4", ("<string>", 4, "")),
    ],
)
def test_a_place_is_taken_apart(where: str, parts: tuple[str, int, str]) -> None:
    assert place(where) == parts


# ---------------------------------------------------------------- advice
def test_every_cause_has_advice_and_every_special_one_is_of_a_cause() -> None:
    assert set(ADVICE) == set(CAUSES)
    assert {cause for cause, _, _ in SPECIFIC} <= set(CAUSES)
    assert all(advise(cause, f"aten::{part} of it") == text for cause, part, text in SPECIFIC)
    assert advise("host-sync") == ADVICE["host-sync"]
    assert advise("no cause") == ""


def test_an_operation_that_nobody_typed_is_put_into_words() -> None:
    assert spoken("aten::_local_scalar_dense").startswith("a number is read from the device (.item()")
    assert spoken("aten::mul") == "aten::mul"


# ---------------------------------------------------------------- the command
def test_exit_codes_and_forms(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, ID, "--engine", "emulated")
    assert code == 0, "wrong, and declared so"
    assert out.startswith(f"{ID}: wrong (python-counter), on the emulated engine\n")
    code, out, _ = run(capsys, ID.replace("known", "healthy"), "--engine", "emulated", "--json")
    assert code == 0
    assert json.loads(out)["verdict"] == "screened"
    code, out, _ = run(capsys, ID.replace("known", "sabotaged"), "--engine", "emulated")
    assert code == 1
    assert "_models.py:20\n             return x * self.calls" in out
    code, _, text = run(capsys, "nonsense")
    assert (code, "the right forms" in text) == (2, True)


def test_the_command_line_knows_it(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nonsense"]) == 2
    assert "the right forms" in capsys.readouterr().err


# ---------------------------------------------------------------- real children
def test_a_case_and_factories_in_real_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reads it.py").write_text(READS)
    found = told("reads it.py", tmp_path)
    assert found["id"].startswith("case/reads_it/inference/")
    assert Path(found["file"]).name == "reads it.py"
    assert (found["verdict"], found["cause"]) == ("uncapturable", "host-sync")
    assert found["code"] == "if y.sum() > 4:"
    assert [r["cause"] for r in found["reasons"]] == ["host-sync", "h2d-copy"]
    assert found["seam"]["code"].startswith("Seam(pieces=('stem',), ")
    assert found["arms"]["graphed"]["verdict"] == "uncapturable"
    text = render(found)
    assert text.startswith("reads it.py: uncapturable (host-sync)")
    assert "-> a tensor is made of Python values in every forward" in text


def test_a_loss_that_is_no_scalar_is_told_as_the_judge_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vector.py").write_text(READS.replace('"inference"', '"training"') + "def loss(output, x):\n    return output.mean(0)\n")
    code, _, text = run(capsys, "vector.py", "--engine", "emulated")
    assert code == 2
    assert "the loss is a torch.float32 tensor of shape (8,), where a scalar is needed" in text


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("gone.module:make", "there is no module 'gone' on the path"),
        ("explained_zoo:absent", "explained_zoo has no 'absent'; it has: needs"),
        ("explained_zoo:needs", "it needs width; name a function without required arguments, such as\n    def make():\n"),
        ("explained_zoo:text", "it returned a str; a factory returns a torch.nn.Module"),
        ("explained_zoo:narrow", "mat1 and mat2 shapes cannot be multiplied"),
        ("explained_zoo:fails", "explained_zoo:fails() raised ZeroDivisionError"),
    ],
)
def test_what_a_factory_lacks_is_said_by_name(
    target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("explained_zoo.py").write_text(
        "import torch\ndef needs(width): return torch.nn.Linear(width, 1)\ndef text(): return 'x'\n"
        "def narrow(): return torch.nn.Linear(3, 1)\ndef fails(): return 1 / 0\n"
    )
    code, _, text = run(capsys, target, "--input", "2x4", "--engine", "emulated")
    assert code == 2
    assert words in text


def test_a_target_stands_in_the_error_as_it_was_typed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain", "torchvision.models:factory")
    assert code == 2
    assert "torchvision.models:factory" in err  # a console may take :factory: for a picture
