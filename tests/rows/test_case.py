"""Case files: read without being executed, refused with an example of the right form."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from parity.rows import case
from parity.rows.case import EXAMPLE, TRAINING_EXAMPLE, CaseError, case_family, case_name, declared
from parity.rows.discovery import DiscoveryError, Selection, discover
from parity.rows.family import Family
from parity.rows.row import Settings
from parity.rows.training import Training

WHOLE = """
    import torch
    MODE = "inference"
    def build():
        return torch.nn.Identity()
    def probes(device):
        return (torch.rand(1, 8).to(device),), (torch.randn(1, 8).to(device),)
"""
LOUD = """
    raise RuntimeError("executed")
    MODE = "inference"
    def build(): ...
    def probes(device): ...
"""


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def test_a_case_is_a_family_of_its_own_zoo(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    catalogue = discover([path])
    assert [r.id for r in catalogue.select(Selection(("case",)))] == [
        "case/mine/inference/inference/b1-float32/bare",
        "case/mine/inference/inference/b1-float32/graphed",
    ]
    assert catalogue.sources == (str(path),)
    family = catalogue.zoos[0].families[0]
    assert (family.between, family.context) == (None, None)


def test_a_case_is_not_executed_to_be_found(tmp_path: Path) -> None:
    path = write(tmp_path, LOUD)
    catalogue = discover([path])
    (family,) = catalogue.zoos[0].families
    with pytest.raises(RuntimeError, match="executed"):
        family.build(family.rows()[0].settings)


def test_finding_and_listing_a_case_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, LOUD)
    found = f"discover([{str(path)!r}]).select(Selection())"
    code = f"import sys; from parity.rows.discovery import *; {found}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_optional_names_are_taken_up(tmp_path: Path) -> None:
    more = """
    import contextlib
    SEEN = []
    def between(module):
        SEEN.append(module)
        module.seen = SEEN
    @contextlib.contextmanager
    def context(device):
        SEEN.append(device)
        yield
    """
    family = case_family(write(tmp_path, WHOLE + more))
    assert isinstance(family, Family)
    assert family.between is not None
    assert family.context is not None
    first, second = family.build(Settings()).module, family.build(Settings()).module
    with family.context("there"):
        family.between(first)
    family.between(second)
    assert first.seen == ["there", first], "the globals of one build are not another's"
    assert second.seen == ["there", second]


@pytest.mark.parametrize("line", ['MODE: str = "inference"', "MODE = 'inference'"])
def test_how_the_mode_may_be_written(tmp_path: Path, line: str) -> None:
    assert case_family(write(tmp_path, WHOLE.replace('MODE = "inference"', line))).task == "inference"


@pytest.mark.parametrize(
    ("drop", "missing"),
    [
        (('MODE = "inference"',), "MODE"),
        (("def build():", "return torch.nn.Identity()"), "build"),
        (("def build():", "return torch.nn.Identity()", 'MODE = "inference"'), "build, MODE"),
    ],
)
def test_what_is_missing_is_named_with_an_example(tmp_path: Path, drop: tuple[str, ...], missing: str) -> None:
    text = "\n".join(line for line in WHOLE.splitlines() if line.strip() not in drop)
    path = write(tmp_path, text)
    with pytest.raises(CaseError) as caught:
        case_family(path)
    assert str(caught.value) == f"{path}: a case file needs {missing}; the right form:{EXAMPLE}"
    with pytest.raises(DiscoveryError, match=f"a case file needs {missing}"):
        discover([path])


@pytest.mark.parametrize("mode", ['"train"', "42", "some_call()"])
def test_a_mode_that_is_none(tmp_path: Path, mode: str) -> None:
    with pytest.raises(CaseError, match="needs MODE"):
        case_family(write(tmp_path, WHOLE.replace('"inference"', mode)))


def test_a_training_case_needs_a_loss(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="needs loss"):
        case_family(write(tmp_path, WHOLE.replace('"inference"', '"training"')))


def test_a_training_case_is_never_judged_as_inference(tmp_path: Path) -> None:
    text = WHOLE.replace('"inference"', '"training"') + "    def loss(output, *inputs): ...\n"
    family = case_family(write(tmp_path, text))
    assert isinstance(family, Training)
    assert [row.id for row in family.rows()] == [f"case/mine/training/training/b1-float32/{arm}" for arm in ("bare", "graphed")]
    assert (family.unavailable, family.accumulate) == ("", 1)
    assert case_family(write(tmp_path, text + "    ACCUMULATE = 3\n")).accumulate == 3


TRAINED = """
    import torch
    MODE = "training"
    def build():
        return torch.nn.Linear(2, 1).eval()
    def probes(device):
        return (torch.ones(1, 2).to(device), 1.0), (torch.zeros(1, 2).to(device), 2.0)
    def loss(output, x, factor):
        return (output * factor).sum()
"""


def test_the_loss_of_a_case_is_given_the_networks_output_and_every_input(tmp_path: Path) -> None:
    family = case_family(write(tmp_path, TRAINED))
    assert isinstance(family, Training)
    subject = family.build(family.rows()[0].settings)
    assert subject.module.training
    assert family.probes is not None
    _, second = family.probes("cpu")
    seen = []

    def forward(*args: object) -> object:
        seen.append(len(args))
        return subject.network(args[0])

    assert torch.equal(subject.loss(forward, *second), 2 * subject.module.bias.sum())
    assert seen == [2]


@pytest.mark.parametrize("value", ["0", "True", "'two'", "count()"])
def test_an_accumulate_that_is_no_number_of_batches(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, TRAINED + f"    ACCUMULATE = {value}\n")
    with pytest.raises(CaseError, match=r"mine\.py: ACCUMULATE must be a whole number of batches") as caught:
        case_family(path)
    assert "another name" not in str(caught.value)


def test_between_is_no_part_of_a_training_case(tmp_path: Path) -> None:
    path = write(tmp_path, TRAINED + "    def between(module): ...\n")
    with pytest.raises(CaseError, match="a training step has none"):
        case_family(path)


def test_the_example_is_right(tmp_path: Path) -> None:
    path = write(tmp_path, "import torch\nclass MyModule(torch.nn.Identity): ...\n" + textwrap.dedent(EXAMPLE))
    family = case_family(path)
    assert family.build(family.rows()[0].settings).module.__class__.__name__ == "MyModule"
    assert family.probes is not None
    a, b = family.probes("cpu")
    assert a[0].shape == b[0].shape == (1, 8)


def test_the_example_of_training_is_right(tmp_path: Path) -> None:
    module = "import torch\nclass MyModule(torch.nn.Linear):\n    def __init__(self): super().__init__(8, 2)\n"
    text = module + textwrap.dedent(TRAINING_EXAMPLE)
    family = case_family(write(tmp_path, text))
    assert family.mode == "training"
    with pytest.raises(CaseError) as caught:
        case_family(write(tmp_path, text.replace("def loss", "def lost")))
    assert "needs loss" in str(caught.value)
    assert str(caught.value).endswith(TRAINING_EXAMPLE)


@pytest.mark.parametrize("content", [b"def build(:", b"\xff\xfe\x00", b"a\x00b"])
def test_not_python(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(content)
    with pytest.raises(CaseError, match=r"mine\.py: not Python"):
        declared(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match=r"nowhere\.py: no such case file \(No such file or directory\)"):
        discover([tmp_path / "nowhere.py"])


def test_two_cases_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [write(tmp_path / "a", WHOLE), write(tmp_path / "b", WHOLE)]
    with pytest.raises(DiscoveryError, match="declared twice: family case/mine/inference"):
        discover(paths)


@pytest.mark.parametrize(("name", "family"), [("my case.py", "my_case"), ("a\t b.py", "a__b"), (" .py", "_"), ("plain.py", "plain")])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_blank_in_a_name_is_an_underscore_in_the_id(tmp_path: Path, name: str, family: str, mode: str) -> None:
    path = write(tmp_path, WHOLE.replace("inference", mode) + "    def loss(output, *inputs): ...\n", name)
    (row, *_) = case_family(path).rows()
    assert row.family == family == case_name(path)


OPERATOR = """
import torch

MODE = "inference"
calls = []


@torch.library.custom_op("parity_test_case::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    calls.append(1)
    return x * 2


def build():
    return torch.nn.Identity()


def probes(device):
    return (torch.ones(2),), (torch.zeros(2),)
"""


def test_a_file_that_is_executed_again_leaves_the_operators_of_earlier_builds_callable(tmp_path: Path) -> None:
    path, other = tmp_path / "counted.py", tmp_path / "another.py"
    path.write_text(OPERATOR, encoding="utf-8")
    other.write_text(OPERATOR, encoding="utf-8")
    made = torch.library.custom_op
    first, second = case._fresh(path), case._fresh(path)
    assert first.counted is second.counted
    assert first.counted(torch.ones(2)).tolist() == [2, 2]
    assert (first.calls, second.calls) == ([], [1])  # of the latest copy: what it keeps starts anew
    assert case._fresh(other).counted is not first.counted
    assert torch.library.custom_op is made
