"""Rows that are at fault themselves: status broken, and a message that names the row, what is wrong and the right form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parity.judge.outcome import Outcome
from parity.judge.verdict import verdict_of
from parity.rows.discovery import Catalogue
from parity.rows.family import Family, Fixed, Input, Subject, Zoo
from parity.rows.row import Row

from .judging import ENGINE, Scale, catalogue_of, failed, outcome_of, subject

ID = "zoo/family/task/inference/b1-float32/bare"
pytestmark = pytest.mark.usefixtures("fresh")


class Returns(nn.Module):
    def __init__(self, made: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: torch.Tensor) -> Any:
        return self.made(x)


class Hidden:
    """An object that torch's pytree does not know."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Drifts(Scale):
    built = 0

    def __init__(self) -> None:
        super().__init__()
        Drifts.built += 1
        with torch.no_grad():
            self.weight.mul_(Drifts.built)


class Renames(nn.Identity):
    built = 0

    def __init__(self) -> None:
        super().__init__()
        Renames.built += 1
        setattr(self, f"layer{Renames.built}", nn.Linear(4, 4))


def _raises(_: Any) -> Any:
    raise KeyError("no_such_model")


def broken(outcome: Outcome, arm: str = "bare") -> str:
    assert outcome.status == "broken"
    assert not outcome.checks
    found = verdict_of(outcome, ENGINE)
    assert (found.verdict, found.cause) == ("crashed", "unknown")
    return outcome.message


BUILDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises": (_raises, "build() raised KeyError: 'no_such_model'"),
    "returns a module": (lambda _: Scale(), "build() returned a Scale, not a Subject around a torch.nn.Module"),
    "returns nothing": (lambda _: None, "build() returned a NoneType, not a Subject around a torch.nn.Module"),
    "holds no module": (
        lambda _: Subject(abs, abs),
        "build() returned a builtin_function_or_method, not a Subject around a torch.nn.Module",
    ),  # type: ignore[arg-type]
    "drifts": (lambda _: subject(Drifts()), "build() is not deterministic: two builds with seed 0 differ in weight"),
    "renames": (lambda _: subject(Renames()), "build() is not deterministic: two builds with seed 0 differ in the names of parameters"),
    "no tensor": (lambda _: subject(Returns(lambda x: ("label", 3))), "the forward returned no tensor: there is nothing to compare"),
    "hides tensors": (
        lambda _: subject(Returns(Hidden)),
        "the forward returns a Hidden, whose tensors cannot be seen: register it with torch's pytree",
    ),
    "wrong shape": (lambda _: subject(nn.Linear(5, 1)), "the forward, for inputs [(1, 4)], raised RuntimeError: "),
    "raises in forward": (lambda _: subject(Returns(lambda x: x.no_such)), "the forward, for inputs [(1, 4)], raised AttributeError: "),
}


@pytest.mark.parametrize("case", BUILDERS)
@pytest.mark.parametrize("arm", ["bare", "graphed"])
def test_a_broken_row_says_what_is_wrong_with_it(case: str, arm: str) -> None:
    build, message = BUILDERS[case]
    assert broken(outcome_of(catalogue_of(build), arm), arm).startswith(f"{ID.replace('bare', arm)}: {message}")


@pytest.mark.parametrize("case", BUILDERS)
def test_the_first_row_of_a_process_is_told_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very first call of a process is thrown away, its errors are not."""
    from parity.judge import inference

    monkeypatch.setattr(inference, "_MEMORY", inference._Memory(warm=False))
    build, message = BUILDERS[case]
    assert message in broken(outcome_of(catalogue_of(build)))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda size, batch: Input((batch, 4)), "inputs(size, batch) must return a tuple of arguments, not a Input: (Input(...),)"),
        (lambda size, batch: [Input((batch, 4))], "inputs(size, batch) must return a tuple of arguments, not a list: (Input(...),)"),
        (lambda size, batch: (Input((batch, 4), dtype="float33"),), "inputs(size, batch) raised AttributeError: "),
        (lambda size, batch: (Fixed("text"),), "inputs(size, batch) raised TypeError: "),
        (lambda size, batch: 1 / 0, "inputs(size, batch) raised ZeroDivisionError: "),
    ],
)
def test_inputs_that_cannot_be_drawn(inputs: Any, message: str) -> None:
    assert broken(outcome_of(catalogue_of(lambda _: subject(Scale()), inputs))).startswith(f"{ID}: {message}")


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        (lambda device: torch.rand(1), "probes(device) must return two tuples of arguments: ((x,), (y,))"),
        (lambda device: ((torch.rand(1),),), "probes(device) must return two tuples of arguments: ((x,), (y,))"),
        (lambda device: (torch.rand(1), torch.rand(1)), "probes(device) must return two tuples of arguments: ((x,), (y,))"),
        (lambda device: 1 / 0, "probes(device) raised ZeroDivisionError: "),
        (lambda device: ((torch.rand(1, 5),), (torch.rand(1, 5),)), "the forward, for inputs [(1, 5)], raised RuntimeError: "),
    ],
)
def test_probes_of_a_case_that_are_none(probes: Any, message: str) -> None:
    catalogue = catalogue_of(lambda _: subject(Scale()), probes=probes, other_batch=None)
    assert broken(outcome_of(catalogue)).startswith(f"{ID}: {message}")


def test_another_batch_that_the_model_does_not_take() -> None:
    """``other_batch`` is the family's own word: a batch that cannot be run is a fault of the declaration."""
    catalogue = catalogue_of(lambda _: subject(Returns(lambda x: x.reshape(4) * 2)))
    assert "the forward, for inputs [(2, 4)], raised RuntimeError: " in broken(outcome_of(catalogue))


def test_an_arm_that_the_subject_does_not_have() -> None:
    catalogue = catalogue_of(lambda _: subject(Scale()), arms=("bare", "native"))
    message = broken(outcome_of(catalogue, "native"), "native")
    assert message.endswith("it declares an arm 'native', but its Subject has none")


class NetworkNeeded(RuntimeError):
    """As the worker calls its own."""


class LocalEntryNotFoundError(ValueError):
    """As huggingface_hub calls its own."""


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("2 GiB"), NetworkNeeded("weights"), LocalEntryNotFoundError("weights")]
)
@pytest.mark.parametrize("place", ["build", "forward"])
def test_what_is_not_the_rows_fault_is_left_to_the_worker(error: Exception, place: str) -> None:
    """Which calls it out_of_memory or unavailable, not broken; a library may have raised something else on top."""

    def fail(*_: Any) -> Any:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise error
        raise OSError("could not load the weights") from error

    build = fail if place == "build" else lambda _: subject(Returns(fail))
    with pytest.raises((type(error), OSError)):
        outcome_of(catalogue_of(build))


def test_a_broken_row_does_not_spoil_the_next() -> None:
    broken(outcome_of(catalogue_of(_raises)))
    assert failed(outcome_of(catalogue_of(lambda _: subject(Scale())))) == []


def test_an_unavailable_family_is_not_touched() -> None:
    family = Family("zoo", "family", "task", _raises, _raises, unavailable="its weights need the network")
    catalogue = Catalogue((Zoo("zoo", "torch", "", (family,), lambda: None, lambda: ""),), ())
    outcome = outcome_of(catalogue)
    assert (outcome.status, outcome.message) == ("unavailable", "its weights need the network")
    assert outcome.row == Row("zoo", "family", "task", arm="bare").id
