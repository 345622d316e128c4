"""Why an arm's bits differ: conditions under which they do not, or, where there are none, what the difference itself says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from parity.judge.counterfactual import draws
from parity.judge.counterfactual.conditions import CONDITIONS, Condition, applicable, traits
from parity.judge.counterfactual.draws import FIXED
from parity.judge.counterfactual.noise import NoisyOp
from parity.judge.counterfactual.search import Proof, Search, Trial, search
from parity.judge.train.causes import lasting
from parity.judge.train.comparison import Comparison, Found, Run, compared
from parity.judge.train.sides import ALIGNED, PLAIN, ArmFailed, ArmSide, EagerSide, settings_of
from parity.judge.train.step import TrainBench, run_step

QUORUM = 4
"""Eager runs that count. Before them goes one that is thrown away."""
ARM_RUNS = 3
BUDGET = 64
"""Sets of conditions that are tried at most."""
PATIENCE = 150.0
"""Seconds after which no further set is tried. Making smaller what quiets eager may take half of them."""


@dataclass
class Proving:
    """The arms of one row under conditions. ``comparison``: replays, under none; ``at_capture``: the run that captured, under none."""

    bench: TrainBench
    eager: EagerSide
    side: ArmSide
    comparison: Comparison
    at_capture: Comparison
    ops: list[NoisyOp] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _arm_runs: dict[tuple[str, ...], tuple[Run, list[Run]]] = field(default_factory=dict)
    _stop: Callable[[], bool] = lambda: False

    def beyond(self) -> list[Found]:
        """Differences that no condition can take away: missing tensors, other shapes, another count of steps, and generators that a
        replay leaves elsewhere, be it that both start from one state."""
        found = [f for f in self.comparison.found if f[1] == "rng" or not f[2].formed_alike]
        if not found and not self.eager.draws():
            found = [f for f in self.at_capture.found if f[1] == "rng"]
        return found or [f for f in self.at_capture.found if lasting(f)]

    def find(self) -> Search:
        """The smallest set under which eager agrees with itself, and the arm with it.

        All runs start from one state of all generators. That the run which captures has to agree, too, is what ``rng-aligned`` lifts:
        it stands for generators that are put back after a capture.
        """
        found = self._searched(self._candidates())
        if found.proof is None or not found.proof.conditions or self.holds(found.proof):
            return found
        return self._widened(found, found.proof)

    def _widened(self, found: Search, proof: Proof) -> Search:
        """Of an op that is noisy now and then a search may miss the noise: then all that quiets this step, more than is needed."""
        self.notes.append(f"under {', '.join(proof.conditions)} all agreed at first, and not in {QUORUM} runs")
        names = self.quietest(proof.conditions)
        added = (c.cause for c in CONDITIONS if c.name in names and c.name not in proof.conditions)
        wider = Proof(names, tuple(dict.fromkeys((*proof.causes, *added))), minimal=False)
        holds = wider.conditions != proof.conditions and self.holds(wider)
        return Search(wider if holds else None, found.tried, found.cut)

    def _candidates(self) -> tuple[Condition, ...]:
        self.ops = self.eager.noisy_ops()
        remedies = {remedy for op in self.ops for remedy in op.remedies}
        random = bool(self.at_capture.found) and self.eager.draws()
        has = traits(autocast=self.bench.dtype != torch.float32, random=random, cuda=self.bench.engine.certifies, remedies=remedies)
        return applicable(has)

    def quietest(self, conditions: tuple[str, ...]) -> tuple[str, ...]:
        """These conditions, and every setting beside them that takes noise from an op of this step; in the order of the table."""
        settings = (c.name for c in self._candidates() if c.cause == "nondeterministic-kernel")
        return (*in_order((*settings, *conditions)), *(c for c in conditions if c == FIXED))

    def twists_beside(self, conditions: tuple[str, ...]) -> list[tuple[str, ...]]:
        """What the eager arm may do otherwise beside these conditions, the fewest first."""
        others = [c.name for c in self._candidates() if c.kind == "eager" and c.name not in conditions]
        return [some for size in range(1, len(others) + 1) for some in itertools.combinations(others, size)]

    def _searched(self, candidates: Sequence[Condition]) -> Search:
        """What is cheap comes first. Where eager agrees with itself, that is what needs no new capture. Where it does not, it is eager
        alone: settings that quiet it are found without a capture, and the arm is compared under them."""
        self._stop = _after(PATIENCE)
        settings = [c for c in candidates if settings_of([c.name])]
        others = [c for c in candidates if c not in settings]
        first = self._quieted(settings, others) if self._noise(frozenset()) else self._search(self._differing, others)
        if first.proof is not None or first.cut:
            return first
        found = self._search(self._differing, candidates)
        return Search(found.proof, tuple(dict.fromkeys((*first.tried, *found.tried))), found.cut)

    def _quieted(self, settings: Sequence[Condition], others: Sequence[Condition]) -> Search:
        quiet = search(self._noise, settings, budget=BUDGET, stop=_after(PATIENCE / 2), whole=True)
        noisy = tuple(t for t in quiet.tried if t.differing)  # where eager agrees with itself nothing was said of the arm
        if quiet.proof is None:
            return Search(None, noisy, quiet.cut)
        base = quiet.proof
        rest = [c for c in settings if c.name not in base.conditions]  # eager may agree by luck where an op of the arm still does not
        found = self._search(lambda names: self._differing(names | frozenset(base.conditions)), [*others, *rest], whole=True)
        tried = tuple(Trial(in_order((*base.conditions, *t.conditions)), t.differing) for t in found.tried)
        if found.proof is None:
            return Search(None, (*noisy, *tried), found.cut)
        causes = tuple(dict.fromkeys((*base.causes, *found.proof.causes)))
        minimal = base.minimal and found.proof.minimal and not found.proof.conditions  # without twists each setting was left out once
        return Search(Proof(in_order((*base.conditions, *found.proof.conditions)), causes, minimal), (*noisy, *tried), False)

    def _search(self, agree: Callable[[frozenset[str]], bool | int], conditions: Sequence[Condition], *, whole: bool = False) -> Search:
        return search(agree, conditions, budget=BUDGET, stop=self._stop, whole=whole)

    def own_stream(self) -> bool:
        """Whether the arm draws random numbers from a stream that no generator of eager's decides, and differs in nothing else. Such an
        arm differs from run to run, though all start alike: one that does not only draws too often, or not at all."""
        found = self.comparison.found
        parts = {part for _, part, _ in found}
        moves = any(len(set(t.arm)) > 1 and not t.noisy for _, part, t in found if part != "rng")
        if not moves or "rng" not in parts or not self.eager.draws() or not all(t.formed_alike for _, _, t in found):
            return False
        eager = self.eager.runs({FIXED}, QUORUM)
        try:
            found = compared(eager, self._runs((FIXED,), 2)[1]).found
        except ArmFailed as failed:
            self.notes.append(f"under {FIXED} the arm fails: {failed}")
            return False
        return all(part == "rng" for _, part, _ in found)

    def _differing(self, names: frozenset[str]) -> bool | int:
        aligned, settings = ALIGNED in names, settings_of(names)
        if not names - {ALIGNED}:
            return _count(self.comparison.found, [] if aligned else self.at_capture.found)
        if not settings and not any(tensor.noisy for _, _, tensor in self.comparison.found):  # then one run tells
            found = compared(self.eager.runs(names - {ALIGNED}, 1), self._arm_under(settings)[1]).found
            if found:
                return len(found)
        if noise := self._noise(names - {ALIGNED}):
            return noise
        eager = self.eager.runs(names - {ALIGNED}, QUORUM)
        try:
            at_capture, runs = self._arm_under(settings)
        except ArmFailed as failed:
            self.notes.append(f"under {', '.join(settings)} the arm fails: {failed}")
            return False
        return _count(compared(eager, runs).found, [] if aligned else compared(eager, [at_capture]).found)

    def _noise(self, names: frozenset[str]) -> int:
        """How many tensors eager does not have alike in all its runs."""
        if not names:
            return sum(tensor.noisy for _, _, tensor in self.comparison.found)
        for count in (2, QUORUM):  # most noise shows in two runs already
            if noise := compared(self.eager.runs(names, count), []).found:
                return len(noise)
        return 0

    def _arm_under(self, settings: tuple[str, ...]) -> tuple[Run, list[Run]]:
        if settings not in self._arm_runs:
            self._arm_runs[settings] = self._runs(settings, 2)
        return self._arm_runs[settings]

    def _runs(self, settings: tuple[str, ...], count: int) -> tuple[Run, list[Run]]:
        with self.bench.around(), draws.applied(settings):
            if self.side.settings != settings:
                self.side.capture(settings)
            return self.side.at_capture, self.side.runs(count)

    def holds(self, proof: Proof) -> bool:
        """Whether as many runs as without conditions agree under it. The arm is captured under it afterwards."""
        eager = self.eager.runs(set(proof.conditions) - {ALIGNED}, QUORUM)
        try:
            return compared(eager, self._runs(settings_of(proof.conditions), ARM_RUNS)[1]).exact
        except ArmFailed:
            return False

    def holds_for(self, side: ArmSide, conditions: tuple[str, ...]) -> bool:
        """The same of another arm, which is captured under these conditions."""
        eager = self.eager.runs(set(conditions) - {ALIGNED}, QUORUM)
        with side.watch.entered(), self.bench.around(), draws.applied(settings_of(conditions)):
            return compared(eager, side.runs(ARM_RUNS)).exact

    def blamed_ops(self, proof: Proof | None) -> list[str]:
        """The noisy ops that the proof takes the noise from, as text; without a proof, all that there are."""
        found = [op for op in self.ops if proof is None or set(op.remedies) & set(proof.conditions)]
        return [f"{op.op}{op.module and f' in {op.module}'} at {op.where}" for op in found]

    def only_accumulation(self) -> bool:
        """Whether the gradients of each batch alone are eager's, so that adding them up is what went wrong."""
        found, steps = self.comparison.found, self.bench.family.accumulate
        if not found or steps == 1 or any(part != "gradients" or step == 0 for step, part, _ in found):
            return False
        eager = self.eager.alone("B")
        self.side.state.restore()
        with self.bench.around():
            arm = self.side.ready()
            mine = run_step(self.bench, self.side.subject, arm, self.bench.args("B"), cache=arm.cache, twist=PLAIN)
        return not mine.unlike(eager)


def _after(seconds: float) -> Callable[[], bool]:
    began = time.monotonic()
    return lambda: time.monotonic() - began > seconds


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """As the table has them."""
    return tuple(c.name for c in CONDITIONS if c.name in names)


def _count(*found: list[Found]) -> int:
    """How many tensors there are among the differences, each once."""
    return len({(step, part, tensor.path) for some in found for step, part, tensor in some})
