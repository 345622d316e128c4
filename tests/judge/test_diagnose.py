"""Causes told apart by experiment: cases of the same kinds as the given ones, in other words, and what a cause is told with."""

from __future__ import annotations

import ast
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parity.judge.diagnose import Finding, diagnose, diagnose_between, diagnose_noise, plain
from parity.judge.subject import Bench
from parity.rows.discovery import Catalogue, discover
from parity.rows.row import Row
from parity.runtime.engine import engine

from .judging import ENGINE, catalogue_of, subject, verdict

FOLDER = Path(__file__).parents[1] / "corpus" / "kinds"
pytestmark = pytest.mark.usefixtures("one_thread")


def declared(path: Path) -> dict[str, Any]:
    """The constants of a case file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    pairs = [(n.targets[0], n.value) for n in body if isinstance(n, ast.Assign)]
    return {t.id: v.value for t, v in pairs if isinstance(t, ast.Name) and isinstance(v, ast.Constant)}


KINDS = {path.stem: declared(path) for path in sorted(FOLDER.glob("*.py"))}


@pytest.fixture(scope="module")
def kinds() -> Catalogue:
    return discover(sorted(FOLDER.glob("*.py")))


def bench_of(build: Any) -> Bench:
    catalogue = catalogue_of(lambda settings: subject(build()))
    row = Row("zoo", "family", "task", arm="bare")
    return Bench(row, catalogue.family(row), engine(ENGINE), 0)


def found(build: Any, by: Any = diagnose) -> Finding:
    bench = bench_of(build)
    with bench.engine.entered(), torch.no_grad():
        told: Finding = by(bench)
        return told


def test_the_folder_holds_every_kind() -> None:
    causes = {told["EXPECT_CAUSE"] for told in KINDS.values()}
    assert {"host-sync", "h2d-copy", "d2h-copy", "data-dependent-shape", "side-stream", "python-branch", "python-counter", "host-state",
            "stale-constant", "stale-address", "output-aliasing", "input-mutation", "buffer-drift", ""} <= causes  # fmt: skip
    assert all((told["EXPECT"] == "screened") == (told["EXPECT_CAUSE"] == "") for told in KINDS.values())
    assert all(name.startswith("ok_") == (told["EXPECT"] == "screened") for name, told in KINDS.items())


@pytest.mark.parametrize("name", KINDS)
def test_a_case_of_a_kind_gets_its_verdict_and_cause(name: str, kinds: Catalogue) -> None:
    told, seen = KINDS[name], verdict(Row("case", name, "inference", arm="bare"), kinds)
    assert (seen.verdict, seen.cause) == (told["EXPECT"], told["EXPECT_CAUSE"]), seen
    if seen.verdict == "uncapturable":
        assert f"{name}.py:" in seen.where


@pytest.mark.parametrize("name", [n for n in KINDS if n.startswith("ok_")])
def test_a_healthy_look_alike_passes_on_our_runtime(name: str, kinds: Catalogue) -> None:
    seen = verdict(Row("case", name, "inference", arm="graphed"), kinds)
    assert seen.safe, seen


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"steps": [0, 7]}

    def forward(self, x: Tensor) -> Tensor:
        self.state["steps"][0] += 1
        return x * self.state["steps"][0]


class _Late(nn.Module):
    """Changes its path at the fifth call only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.flip(0) if self.calls >= 5 else x.neg()


class _Longer(nn.Module):
    """Goes on for one operation more at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = np.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.rounds += 1
        for _ in range(int(self.rounds[0])):
            x = x.sin()
        return x


class _Strays(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            y = x.exp()
        return y + 1


class _Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.means: deque[Tensor] = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(x.mean())
        return x - self.means[0]


class _Host(nn.Module):
    def __init__(self, large: bool = False) -> None:
        super().__init__()
        self.gain = torch.zeros(10_000 if large else 1)

    def forward(self, x: Tensor) -> Tensor:
        self.gain += 1
        return x * self.gain[0]


def test_the_attribute_that_moved_is_named() -> None:
    seen = found(_Counts)
    assert seen.cause == "python-counter"
    assert "attribute state['steps'][0] went from 3 to 4" in seen.detail


def test_a_call_that_goes_on_is_told_where_it_does() -> None:
    seen = found(_Longer)
    assert seen.cause == "python-counter"
    assert "x.sin()" in seen.where
    assert "one call ends where another goes on with aten::sin" in seen.detail
    assert "attribute rounds went from array([3.]) to array([4.])" in seen.detail


def test_work_that_no_capture_would_hold_is_told_before_what_it_leaves_behind() -> None:
    seen = found(_Strays)
    assert seen.cause == "side-stream"
    assert "x.exp()" in seen.where
    assert "never joined the capture" in seen.detail


def test_a_change_that_comes_late_is_found() -> None:
    assert found(_Late).cause == "python-counter"


def test_the_holder_of_an_old_tensor_is_named() -> None:
    seen = found(lambda: _Buffered())
    assert (seen.cause, seen.detail.rpartition(" ")[2]) == ("stale-address", "average")


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average + x.mean()
        return x - self.average


def test_a_tensor_in_a_deque_is_an_old_one() -> None:
    assert found(_Remembers).cause == "stale-address"


@pytest.mark.parametrize("large", [False, True])
def test_a_host_tensor_is_state_of_the_host(large: bool) -> None:
    """Of a large one only the number of elements is compared; the element that a kernel is given is small."""
    assert found(lambda: _Host(large)).cause == "host-state"


class _KeepsDoubled(nn.Linear):
    """Keeps what it derived from its weight, until told to forget it."""

    doubled: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.doubled is None:
            self.doubled = self.weight * 2
        return nn.functional.linear(x, self.doubled)


def forget(module: Any) -> None:
    module.doubled = None


@pytest.mark.parametrize(("between", "cause"), [(forget, "stale-address"), (lambda module: None, "unknown")])
def test_what_is_dropped_between_calls_is_an_old_address_and_no_branch(between: Any, cause: str) -> None:
    """The next call derives it anew, by an operation more: that is not what a graph gets wrong."""
    catalogue = catalogue_of(lambda settings: subject(_KeepsDoubled(4, 4)), between=between)
    row = Row("zoo", "family", "task", arm="bare")
    bench = Bench(row, catalogue.family(row), engine(ENGINE), 0)
    with bench.engine.entered(), torch.no_grad():
        assert diagnose_between(bench).cause == cause


def test_a_healthy_model_has_no_cause() -> None:
    assert found(lambda: nn.Linear(4, 4)) == Finding("unknown")
    assert found(lambda: nn.Linear(4, 4), diagnose_noise) == Finding("nondeterministic-kernel")


def test_plain_attributes_leave_out_what_torch_keeps() -> None:
    module = nn.Sequential(_Counts())
    assert plain(module) == {"training": "True", "0.training": "True", "0.state['steps']": "2 entries", "0.state['steps'][0]": "0",
                             "0.state['steps'][1]": "7"}  # fmt: skip
