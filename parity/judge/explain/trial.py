"""Pieces of a model, captured and compared with eager, bit for bit: in a forward, and in a training step with its backward.

What a trial shows is that the pieces hold for a few calls of one shape. A cut is declared like any other and then judged by the whole
protocol."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parity.judge.bits import Bundle, bundle
from parity.judge.counterfactual.conditions import EagerTwist
from parity.judge.explain.calls import replaced
from parity.judge.explain.seams import Cut, OutOfTime, Proposal, proven
from parity.judge.records import around, snapshot
from parity.judge.subject import Bench, blamed, seed_everything
from parity.judge.train.step import TrainBench, run_step
from parity.rows.training import TrainSubject
from parity.runtime.seams import Seam
from parity.runtime.training import TrainGraphs

CALLS = ("A", "B")
"""Of a forward: one capture, and one replay of other values."""
STEPS = ("A", "B", "A", "B")
"""Of a training: the first step tells how gradients arrive, a graph replays the others, weights updated in between."""
RATE = 1e-3
LIMIT = 50.0
"""Seconds for all trials of a training row; looked at before each step and each call of a piece, so that a capture may exceed it."""
NOISY = "eager differs from itself: not proved"
_REFUSED = "it cannot be captured: "
_PLAIN = EagerTwist()


# ---------------------------------------------------------------- a forward
def of_forward(bench: Bench, expected: Sequence[Bundle]) -> Cut:
    """``expected``: the results of a fresh eager module along CALLS."""

    def cut(paths: Sequence[str]) -> tuple[str, dict[str, str]]:
        subject = bench.build()
        call = subject.compose(subject.region)
        bound = Seam(tuple(paths)).bind(subject.module)
        different = ""
        seed_everything(bench.seed)
        with around(bench), bound.scope():
            for number, (probe, reference) in enumerate(zip(CALLS, expected, strict=True)):
                found = snapshot(bench, call(*bench.args(probe))).unlike(reference)
                if found:
                    different = f"call {number + 1}: {found[0]}"
                    break
        failing = {}
        for path, runner in bound.runners.items():
            info = runner.info()
            if info.eager:
                failing[path] = next(iter(info.eager))
            elif not info.replays:
                failing[path] = "it was never replayed"
        bound.release()
        return different, failing

    return cut


# ---------------------------------------------------------------- a training step
Walked = list[list[Bundle]]
"""What each step of STEPS left behind, and, at last, the weights."""


class Clock:
    """Raises OutOfTime where it is looked at after ``limit`` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._end = time.monotonic() + limit

    def look(self) -> None:
        if time.monotonic() > self._end:
            raise OutOfTime(f"{self.limit:.0f} s were not enough")


class _Noisy(Exception):
    """Eager itself does not repeat."""


def proven_in_steps(bench: TrainBench, again: Callable[[Collection[str]], Proposal], wrong: Collection[str] = ()) -> Proposal:
    """``proven`` by training steps. Where bits differ, eager walks once more: if it differs from itself, bits prove nothing, and only
    whether the pieces are captured and replayed is looked at. Raises BrokenRow where an eager step fails."""
    clock = Clock(LIMIT)
    first = again(wrong)
    try:
        expected = eager_steps(bench, clock) if first.pieces else []
    except OutOfTime as late:
        return replace(first, proof=f"not tried: {late}")
    compared = of_steps(bench, expected, clock)

    @functools.cache
    def noisy() -> bool:
        try:
            return bool(unlike(eager_steps(bench, clock), expected))
        except OutOfTime:
            return False  # no further trial has time either, and says so

    def cut(paths: Sequence[str]) -> tuple[str, dict[str, str]]:
        different, failing = compared(paths)
        if different and noisy():
            raise _Noisy
        return different, failing

    try:
        return proven(again, cut, wrong)
    except _Noisy:
        return proven(again, of_steps(bench, [], clock), wrong, NOISY)


def eager_steps(bench: TrainBench, clock: Clock) -> Walked:
    """Of a fresh module."""
    subject = bench.build()
    found: Walked = []
    with bench.around(), blamed(lambda: "a training step"):
        for bundles in _steps(bench, subject):
            found.append(bundles)
            clock.look()
    return found


def of_steps(bench: TrainBench, expected: Walked, clock: Clock) -> Cut:
    """Each piece under training graphs of its own. ``expected``: what eager left behind; empty where bits are not to be compared."""

    def cut(paths: Sequence[str]) -> tuple[str, dict[str, str]]:
        clock.look()
        subject = bench.build()
        with bench.around(), _captured(subject.module, paths, clock) as graphs:
            step = 0
            try:
                for step, bundles in enumerate(_steps(bench, subject), 1):
                    clock.look()
                    if refused := _refused(graphs):
                        return "", refused
                    if expected and (different := unlike([bundles], expected[step - 1 :], step)):
                        return different, {}
            except (OutOfTime, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # eager's steps were right: what is captured is at fault
                told = str(error).strip().partition("\n")[0]
                return f"step {step + 1} raised {type(error).__name__}: {told}", _refused(graphs)
            return "", _unreplayed(graphs)

    return cut


def unlike(actual: Walked, expected: Walked, first: int = 1) -> str:
    """The first difference, in words. ``first``: the number of the first step given."""
    for number, (mine, theirs) in enumerate(zip(actual, expected, strict=False), first):
        place = f"step {number}" if number <= len(STEPS) else "after the last step"
        for part, reference in zip(mine, theirs, strict=True):
            if found := part.unlike(reference):
                return f"{place}: {found[0]}"
    return ""


def _steps(bench: TrainBench, subject: TrainSubject) -> Iterator[list[Bundle]]:
    seed_everything(bench.seed)
    for probe in STEPS:
        subject.module.zero_grad(set_to_none=True)
        left = run_step(bench, subject, subject.network, bench.args(probe), cache=True, twist=_PLAIN)
        yield [part for _, part in left.parts()]
        with torch.no_grad():
            for parameter in subject.module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-RATE / bench.scale)
    with bench.engine.quiet(), torch.no_grad():
        weights = bundle([(f"weight {name}", p) for name, p in subject.module.named_parameters()])
    yield [weights]


class _Region(nn.Module):
    """A method of a module, as a network of its own on the same parameters."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.training = owner.training
        self.owner = owner
        self._method = getattr(owner, name)  # as it was before anything took its place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


@contextmanager
def _captured(module: nn.Module, paths: Sequence[str], clock: Clock) -> Iterator[dict[str, TrainGraphs]]:
    """Within it each piece runs under graphs of its own, which are returned by path."""
    made: dict[str, TrainGraphs] = {}
    with ExitStack() as stack:
        for piece in Seam(tuple(paths)).bind(module).pieces:
            graphs = TrainGraphs(_Region(piece.owner, piece.name), threshold=1, log=lambda line: None)
            made[piece.path] = graphs
            stack.enter_context(replaced(piece.owner, piece.name, _timed(graphs, clock)))
            stack.callback(graphs.release)
        yield made


def _timed(graphs: TrainGraphs, clock: Clock) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        clock.look()
        return graphs(*args, **kwargs)

    return call


def _refused(graphs: Mapping[str, TrainGraphs]) -> dict[str, str]:
    return {path: f"refused: {made.reason.removeprefix(_REFUSED)}" for path, made in graphs.items() if made.reason}


def _unreplayed(graphs: Mapping[str, TrainGraphs]) -> dict[str, str]:
    """Those that are not captured once and replayed in every step but the first, or the first two, where the first only tells who
    listens to outputs from which others come."""
    found = {}
    for path, made in graphs.items():
        eager = sum(made.eager.values())
        if made.captures != 1 or eager > 2 or made.replays + eager != len(STEPS):
            why = "".join(f": {reason}" for reason in list(made.eager)[-1:])
            found[path] = f"{made.captures} captures, {made.replays} replays and {eager} eager calls in {len(STEPS)} steps{why}"
    return found
