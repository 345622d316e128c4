"""The pieces that a training row's explanation proposes are tried: what is refused, not replayed, or changes a bit is not proposed;
where eager has no bits of its own, or time is short, the proof says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.judge.explain import trial
from parity.judge.explain.seams import HOLDS, Cut, OutOfTime, Piece, Proposal, proven
from parity.judge.explain.study import study_training
from parity.judge.train.step import TrainBench
from parity.rows.row import Settings
from parity.rows.training import TrainSubject
from parity.runtime.engine import engine
from parity.runtime.seams import Seam

from .test_explain_seams import deep
from .training_rows import ENGINE, catalogue_of, near

pytestmark = pytest.mark.usefixtures("one_thread")


class Reads(nn.Module):
    """Its end reads the device, so that the whole cannot be captured. ``middle``: what is looked at."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem, self.middle, self.head = deep(6), middle, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.stem(x))
        return self.head(x) * (2.0 if x.sum() > 0 else 1.0)


CALLS = [0]
"""Where no capture looks."""


class Counts(nn.Module):
    """Sabotage: what it computes follows a number that a replay freezes. Every build starts it again, so that eager repeats itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep(6)
        CALLS[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return self.layers(x) * float(CALLS[0])


class Drifts(Counts):
    """Eager itself never repeats: no build starts the number again."""

    def __init__(self) -> None:
        before = CALLS[0]
        super().__init__()
        CALLS[0] = before


class Writes(nn.Module):
    """Writes to its input, which the runtime refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.mul_(0.5))


class Frozen(Reads):
    """Its stem has no backward."""

    def __init__(self) -> None:
        super().__init__(deep(6))
        self.stem.requires_grad_(False)


class Stages(nn.Module):
    """Cut at a method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.relu(self.first(x)))) * 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        return self.last(x) * (2.0 if x.sum() > 0 else 1.0)


def learned(kind: Callable[[], nn.Module], loss: Callable[..., Any] = near, on: str = ENGINE) -> dict[str, Any]:
    """The seam that a study proposes. ``on``: the engine."""

    def build(settings: Settings) -> TrainSubject:
        module = kind().train()
        return TrainSubject(module, module, loss)

    catalogue = catalogue_of(build)
    (family,) = catalogue.zoos[0].families
    row = family.rows()[0]
    bench = TrainBench(row, catalogue.training(row), engine(on), 0)
    with bench.engine.entered():
        found: dict[str, Any] = study_training(bench)["seam"]
    return found


def paths(seam: dict[str, Any]) -> list[str]:
    return [piece["path"] for piece in seam["pieces"]]


def test_what_holds_is_proposed_as_code() -> None:
    seam = learned(lambda: Reads(deep(6)))
    assert (paths(seam), seam["proof"], seam["dropped"]) == (["stem", "middle"], "bits equal", [])
    assert eval(seam["code"], {"Seam": Seam}).pieces == ("stem", "middle")


def test_a_method_is_tried_like_a_module() -> None:
    seam = learned(Stages)
    assert (paths(seam), seam["proof"], seam["dropped"]) == (["encode"], "bits equal", [])


def test_a_piece_whose_bits_differ_is_replaced_by_what_it_calls() -> None:
    seam = learned(lambda: Reads(Counts()))
    assert (paths(seam), seam["proof"]) == (["stem", "middle.layers"], "bits equal")
    (told,) = seam["dropped"]
    assert told.startswith("middle: replays other bits: step 2: ")


def test_only_the_comparison_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "unlike", lambda *walks: "")
    seam = learned(lambda: Reads(Counts()))
    assert (paths(seam), seam["proof"], seam["dropped"]) == (["stem", "middle"], "bits equal", [])


def test_a_piece_that_is_refused_is_replaced_by_what_it_calls() -> None:
    seam = learned(lambda: Reads(Writes()))
    assert (paths(seam), seam["proof"]) == (["stem", "middle.layers"], "bits equal")
    (told,) = seam["dropped"]
    assert told.startswith("middle: refused: ")
    assert "in-place operation" in told


def test_only_the_runtimes_word_tells_of_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits are eager's, since it runs eagerly."""
    monkeypatch.setattr(trial, "_refused", lambda graphs: {})
    monkeypatch.setattr(trial, "_unreplayed", lambda graphs: {})
    seam = learned(lambda: Reads(Writes()))
    assert (paths(seam), seam["proof"]) == (["stem", "middle"], "bits equal")


def test_a_piece_that_is_never_replayed_is_not_proposed() -> None:
    seam = learned(Frozen)
    assert (paths(seam), seam["proof"]) == (["middle"], "bits equal")
    assert seam["dropped"][0] == (
        "stem: 0 captures, 0 replays and 4 eager calls in 4 steps: no backward of its signature was seen yet, or only one "
        "inside autocast or with gradients that are not plain"
    )


def test_where_eager_differs_from_itself_nothing_is_claimed() -> None:
    seam = learned(lambda: Reads(Drifts()))
    assert (paths(seam), seam["proof"]) == (["stem", "middle"], "eager differs from itself: not proved")
    assert not Proposal((Piece("stem", 1, 1, 1),), proof=seam["proof"]).holds


def test_where_eager_differs_from_itself_a_refusal_still_counts() -> None:
    class Model(Reads):
        def __init__(self) -> None:
            super().__init__(Writes())
            self.head = nn.Sequential(Drifts(), nn.Linear(6, 4))

    seam = learned(Model)
    assert "middle" not in paths(seam)
    assert "middle.layers" in paths(seam)
    assert seam["proof"] == "eager differs from itself: not proved"


def test_a_step_that_raises_only_with_graphs_is_their_fault() -> None:
    def loss(forward: Callable[..., Any], x: Any, y: Any) -> Any:
        found = forward(x)
        nodes = [found.grad_fn]
        for node in nodes:
            nodes += [n for n, _ in node.next_functions if n is not None]
        if any("Replayed" in node.name() for node in nodes):
            raise ValueError("a graph of another kind")
        return (found - y).square().mean()

    seam = learned(lambda: Reads(deep(6)), loss)
    assert paths(seam) == []
    assert "stem: replays other bits: step 2 raised ValueError: a graph of another kind" in seam["dropped"]


def test_a_trial_without_time_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT", 0.0)
    seam = learned(lambda: Reads(Counts()))
    assert (paths(seam), seam["proof"]) == (["stem", "middle"], "not tried: 0 s were not enough")


def test_without_time_to_ask_eager_again_none_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, clocks = trial.eager_steps, []

    def once(bench: TrainBench, clock: trial.Clock) -> trial.Walked:
        clocks.append(clock)
        if len(clocks) > 1:
            clock._end = 0.0
        return steps(bench, clock)

    monkeypatch.setattr(trial, "eager_steps", once)
    seam = learned(lambda: Reads(Counts()))
    assert (len(clocks), paths(seam)) == (2, [])
    assert seam["proof"].startswith("no cut held: together they replay other bits: step 2: ")
    assert seam["proof"].endswith("; 50 s were not enough")


# ---------------------------------------------------------------- which of them
def proposals(*names: str) -> Callable[[Collection[str]], Proposal]:
    return lambda refused: Proposal(tuple(Piece(name, 0.1, 0.1, 1) for name in names if name not in refused), "Model")


def cut(wrong: Collection[str], together: Collection[str] = (), *, most: int = 99) -> tuple[Cut, list[Sequence[str]]]:
    """A trial of pieces, some ``wrong``, some only ``together``; its time is over after ``most`` calls."""
    asked: list[Sequence[str]] = []

    def call(paths: Sequence[str]) -> tuple[str, dict[str, str]]:
        if len(asked) == most:
            raise OutOfTime("9 s were not enough")
        asked.append(paths)
        return ("off" if set(wrong) & set(paths) or (together and set(together) <= set(paths)) else ""), {}

    return call, asked


def test_those_that_are_wrong_are_found_by_halves() -> None:
    trial, asked = cut("cg")
    found = proven(proposals(*"abcdefgh"), trial)
    assert "".join(p.path for p in found.pieces) == "abdefh"
    assert found.dropped == ("c: replays other bits: off", "g: replays other bits: off")
    assert found.proof == HOLDS
    assert len(asked) == 12, "all, two halves, four, four, and what is left"


def test_those_that_are_wrong_only_together_all_go() -> None:
    found = proven(proposals(*"abcd"), cut("", "ac")[0])
    assert found.pieces == ()
    assert found.dropped[0] == "a: replay other bits together: off"


@pytest.mark.parametrize(("most", "proof"), [
    (0, "not tried: 9 s were not enough"),
    (2, "no cut held: together they replay other bits: off; 9 s were not enough"),
])  # fmt: skip
def test_without_time_to_tell_which_none_is_proposed(most: int, proof: str) -> None:
    found = proven(proposals(*"abcd"), cut("b", most=most)[0])
    assert (found.proof, found.holds, len(found.pieces)) == (proof, False, 0 if most else 4)


def test_without_time_for_the_rest_the_rest_is_not_tried() -> None:
    found = proven(proposals(*"ab"), cut("b", most=3)[0])
    assert ([p.path for p in found.pieces], found.proof) == (["a"], "not tried: 9 s were not enough")
    assert found.dropped == ("b: replays other bits: off",)
