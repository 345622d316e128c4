"""Eager and an arm, each on a subject of its own, in the same state: runs of either, under any conditions."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from parity.judge import census
from parity.judge.counterfactual import draws
from parity.judge.counterfactual.conditions import CONDITIONS, EagerTwist
from parity.judge.counterfactual.draws import FIXED
from parity.judge.counterfactual.noise import NoisyOp, noisy_ops
from parity.judge.outcome import Check
from parity.judge.subject import BrokenRow, blamed
from parity.judge.train.arms import ARMS, TrainArm
from parity.judge.train.comparison import Run
from parity.judge.train.step import Left, State, TrainBench, mixed, run_step, run_steps
from parity.judge.train.trajectory import Travelled, travel
from parity.judge.watch import Watch
from parity.rows.training import TrainSubject
from parity.runtime.errors import StaleGraph
from parity.runtime.memory import Memory
from parity.runtime.refusal import explain

PLAIN = EagerTwist()
ALIGNED = "rng-aligned"
_KINDS = {c.name: c.kind for c in CONDITIONS} | {FIXED: "both"}
_ATTEMPTS = 8
"""Runs that an arm gets to warm up and capture."""


def settings_of(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the conditions that hold for both arms, and under which an arm has to be captured anew."""
    return tuple(sorted(n for n in names if _KINDS[n] == "both" and n != ALIGNED))


def settled(bench: TrainBench, subject: TrainSubject) -> State:
    """The state of a subject once its first step has filled what is built lazily; values and generators are those before it."""
    before = State(subject.module)
    with bench.around(), blamed(lambda: "the eager training step"):
        run_step(bench, subject, subject.network, bench.args("A"), cache=True, twist=PLAIN)
    before.restore(values_only=True)
    return State(subject.module)


@dataclass
class Remembered:
    """What eager left behind, by conditions: runs, and where its trajectories ended. For all arms of one subject. ``changes``: the
    first attribute of the module that a step changes, which a replay would not."""

    runs: dict[tuple[str, ...], list[Run]] = field(default_factory=dict)
    travelled: dict[tuple[tuple[str, ...], tuple[bool, ...]], list[Travelled]] = field(default_factory=dict)
    changes: str = ""
    ops: list[NoisyOp] | None = None
    rehearsed: set[tuple[str, ...]] = field(default_factory=set)


class EagerSide:
    """The reference. The first step of a subject is never kept."""

    def __init__(self, bench: TrainBench, remembered: Remembered) -> None:
        self.bench = bench
        self.remembered = remembered
        self._built: tuple[TrainSubject, State] | None = None

    def _ready(self) -> tuple[TrainSubject, State]:
        if self._built is None:
            subject = self.bench.build()
            if not any(p.requires_grad for p in subject.module.parameters()):
                raise Vacuous("the module has no trainable parameter: there is nothing to train")
            self._built = subject, settled(self.bench, subject)
        return self._built

    def runs(self, names: Iterable[str], count: int) -> list[Run]:
        """``count`` runs under the conditions ``names``, all from the saved state; what was run before is run no more. Before the first
        one under other settings goes one that is thrown away, as before the first of all. Raises BrokenRow, Vacuous."""
        key = tuple(sorted(names))
        found = self.remembered.runs.setdefault(key, [])
        dropped = not found and bool(settings_of(key))
        if len(found) >= count:
            return found[:count]
        subject, state = self._ready()
        twist = draws.twist(key)
        with self.bench.around(), draws.applied(key), blamed(lambda: "the eager training step"):
            while len(found) < count:
                state.restore()
                before = Memory(subject.module)
                made = run_steps(self.bench, subject, subject.network, cache=twist.autocast_cache, twist=twist)
                self.remembered.changes = self.remembered.changes or before.change(Memory(subject.module), tensors=False)
                if dropped:
                    dropped = False
                    continue
                found.append(interned(made, found[0]) if found else made)
        return found[:count]

    def draws(self) -> bool:
        """Whether a step moves a generator."""
        first, second, *_ = self.runs((), 1)[0]
        return bool(first.rng.unlike(second.rng))

    def alone(self, probe: str) -> Left:
        """One step from the saved state on one batch."""
        subject, state = self._ready()
        state.restore()
        with self.bench.around(), blamed(lambda: "the eager training step"):
            return run_step(self.bench, subject, subject.network, self.bench.args(probe), cache=True, twist=PLAIN)

    def noisy_ops(self) -> list[NoisyOp]:
        """The ops of a step that may give other bits the next time. Instrumented: the step is compared with no other one. Its forward
        and loss tell those of the backward, too."""
        if self.remembered.ops is None:
            subject, state = self._ready()
            state.restore()

            def forward() -> None:
                with mixed(self.bench.dtype, cache=True):
                    subject.loss(subject.network, *self.bench.args("A"))

            with self.bench.around(), blamed(lambda: "the eager training step"):
                self.remembered.ops = noisy_ops(forward, subject.network)
        return self.remembered.ops

    def rehearse(self, names: Iterable[str]) -> None:
        """A trajectory under the settings among ``names`` that nobody looks at, before any that counts, an arm's or eager's: what a
        process runs for the first time, of another shape say, it may run otherwise than later (TorchScript compiles for the shapes it
        has seen)."""
        settings = settings_of(names)
        if settings not in self.remembered.rehearsed:
            self._travel(settings, ())
            self.remembered.rehearsed.add(settings)

    def travelled(self, names: Iterable[str], replayed: tuple[bool, ...], count: int) -> list[Travelled]:
        """``count`` trajectories under the conditions ``names``, each on a subject of its own where it changes midway. ``replayed``: by
        the arm that is compared, of each forward."""
        key = tuple(sorted(names))
        found = self.remembered.travelled.setdefault((key, replayed), [])
        while len(found) < count:
            found.append(self._travel(key, replayed))
        return found[:count]

    def _travel(self, names: tuple[str, ...], replayed: tuple[bool, ...]) -> Travelled:
        twist = draws.twist(names)
        more: dict[str, Any] = {"cache": twist.autocast_cache, "twist": twist, "replayed": replayed}
        subject, state = self._ready()
        state.restore()
        with self.bench.around(), draws.applied(names), blamed(lambda: "the eager trajectory"):
            end = travel(self.bench, subject, subject.network, changed=_nothing, replays=int, **more)
        if subject.switch is not None:
            self._built = None
        return end


def _nothing() -> None:
    return None


class Vacuous(Exception):
    """The eager step proves nothing, whatever an arm does."""


def interned(run: Run, known: Run) -> Run:
    """The same run, parts with the bits of a known one replaced by it: several equal runs take the memory of one."""
    return [mine.interned(theirs) for mine, theirs in zip(run, known, strict=True)]


class ArmFailed(Exception):
    """Carries the check that failed."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.detail)
        self.check = check


class ArmSide:
    """An arm on its own subject. ``watch`` counts what it really captured and replayed, whatever it says."""

    def __init__(self, bench: TrainBench, name: str) -> None:
        self.bench = bench
        self.name = name
        self.subject = bench.build()
        self.state = settled(bench, self.subject)
        self.watch = Watch(census.Kernels if bench.engine.certifies else None)
        self.arm: TrainArm | None = None
        self.at_capture: Run = []
        """The run in which the arm captured."""
        self.settings: tuple[str, ...] | None = None
        """The conditions under which the arm was captured, and under which it has to run."""

    def capture(self, settings: tuple[str, ...] = ()) -> TrainArm:
        """A new arm, captured under conditions that the caller has applied. Raises ArmFailed."""
        self.release()
        self.state.restore()
        self.arm = arm = ARMS[self.name](self.subject)
        for _ in range(_ATTEMPTS):
            before, captured = self.watch.replays, self.watch.captures
            gc.collect()  # what hangs in a cycle of an eager step has nodes on another stream, at which a capture fails
            run = self.run()
            if self.watch.captures > captured:
                self.at_capture = run
            if (refusal := arm.refusal()) is not None:
                raise ArmFailed(Check("capture", "failed", refusal.message, refusal.cause, refusal.where, self.figures()))
            if self.watch.replays - before >= arm.replays * len(run) and self.watch.captures:
                self._nothing_outside()
                self.settings = settings
                return arm
        detail = f"{self.watch.captures} captures and {self.watch.replays} replays in {_ATTEMPTS} runs: the arm goes on eagerly"
        detail += f", since {why}" if (why := arm.why()) else ""
        raise ArmFailed(Check("capture", "failed", detail, "host-state", "", {**self.figures(), "not_graphed": True}))

    def release(self) -> None:
        """Drops the arm with its graphs."""
        self.settings = None
        if self.arm is not None:
            self.arm.release()
            self.arm = None
            self.watch.forget()  # whoever holds a graph holds its memory

    def figures(self) -> dict[str, Any]:
        return {"captures": self.watch.captures, "replays": self.watch.replays, "executed_outside": []}

    def _nothing_outside(self) -> None:
        if culprits := census.culprits(self.watch.executed):
            detail = f"executed during capture, so not in the graph: {', '.join(culprits)}"
            raise ArmFailed(Check("capture", "failed", detail, "side-stream", "", {**self.figures(), "executed_outside": culprits}))

    def run(self) -> Run:
        """One run from the saved state. Raises ArmFailed where a step cannot be run."""
        assert self.arm is not None
        self.state.restore()
        try:
            return run_steps(self.bench, self.subject, self.arm, cache=self.arm.cache, twist=PLAIN)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except BrokenRow as error:  # eager's loss was right
            raise ArmFailed(Check("loss", "failed", str(error), "unknown")) from None
        except StaleGraph as error:
            raise ArmFailed(Check("loss", "failed", str(error), "stale-address")) from None
        except Exception as error:
            why = self.arm.refusal() or explain(error, None)
            raise ArmFailed(Check("capture", "failed", why.message, why.cause, why.where, self.figures())) from None

    def ready(self) -> TrainArm:
        """The arm as it was captured, in the saved state."""
        assert self.arm is not None
        self.state.restore()
        return self.arm

    def runs(self, count: int) -> list[Run]:
        found: list[Run] = []
        for _ in range(count):
            made = self.run()
            found.append(interned(made, found[0]) if found else made)
        return found
