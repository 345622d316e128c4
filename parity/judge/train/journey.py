"""The last check of a training row: an arm and eager walk the same several steps, and have to end with the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parity.judge.bits import Difference
from parity.judge.counterfactual import draws
from parity.judge.counterfactual.draws import FIXED
from parity.judge.outcome import Check
from parity.judge.train.causes import failure
from parity.judge.train.proving import Proving, in_order
from parity.judge.train.sides import ALIGNED, PLAIN, ArmFailed, ArmSide, EagerSide, settings_of
from parity.judge.train.step import TrainBench
from parity.judge.train.trajectory import SCRIPT, Travelled, travel
from parity.runtime.refusal import explain


def idle(end: Travelled) -> bool:
    """Whether nothing was replayed on the way, so that equal bits say nothing of a graph."""
    return not any(end.replayed)


@dataclass(frozen=True)
class _Walked:
    """``end``: of the arm, under ``conditions``; ``differences``: what eager has otherwise there. Where there are any, ``noise``: what
    eager has otherwise the next time; ``stale``: what a replay read after it had died."""

    conditions: tuple[str, ...]
    end: Travelled
    differences: list[Difference]
    noise: list[Difference]
    stale: Sequence[str]

    def told(self) -> str:
        if self.noise:
            return f"eager walks another way each time: {self.noise[0]}"
        return f"the arm ends elsewhere than eager, which walks the same way twice: {self.differences[0]}"


def _listed(conditions: tuple[str, ...]) -> str:
    return ", ".join(conditions) or "no condition"


@dataclass
class Journey:
    """``side``: the arm that walks, another one where it had to be captured anew. ``figures``: of the walk that counts."""

    bench: TrainBench
    eager: EagerSide
    side: ArmSide
    proving: Proving
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hidden: tuple[str, ...] = ()
    """What else the eager arm has to do, which the first step did not tell."""
    max_ulp: int = 0
    """How far off the arm ends where the eager one does not do that; negative where ULPs mean nothing."""

    def walk(self, proof: tuple[str, ...]) -> Check:
        """The check ``trajectory``, or ``proof`` where eager cannot be walked twice alike. Raises ArmFailed where the arm raises.

        Under the proof's conditions. Where the arm ends elsewhere, that may be what one step could not show: something that the capture
        does otherwise, and that zeros among the first weights hide (``hidden``); or noise, brought out by weights that move, or so rare
        that eager is the same twice. So eager then does otherwise as well, and both walk once more where all noisy ops are quiet.
        """
        walked = self._walked(proof)
        if walked.differences and (wider := self.proving.quietest(proof)) != proof:
            self.notes.append(f"under {_listed(proof)} {walked.told()}")
            walked = self._walked_anew(wider) or walked
        end = walked.end
        self.figures = {
            "steps": sum(m.update or self.bench.family.accumulate == 1 for m in SCRIPT),
            "forwards": len(SCRIPT),
            "replayed": sum(end.replayed),
            "differing": len(walked.differences),
            "finite": end.finite,
            "conditions": list(walked.conditions),
        }
        if idle(end):
            detail = f"none of {len(SCRIPT)} steps in a row was replayed"
            detail += f", since {why}" if self.side.arm is not None and (why := self.side.arm.why()) else ""
            raise ArmFailed(Check("capture", "failed", detail, "host-state", "", {**self.side.figures(), "not_graphed": True}))
        if not end.finite:
            self.notes.append("over several steps the loss stops being finite: equal bits say little from there on")
        if not walked.differences:
            return Check("trajectory", "passed", figures=self.figures)
        if walked.noise:
            detail = f"over several steps eager differs from itself under {_listed(walked.conditions)}: {walked.noise[0]}"
            return Check("proof", "failed", detail, "nondeterministic-kernel")
        cause, reason = "stale-constant", "one step is right"
        if walked.stale:
            cause, reason = "stale-address", f"read after it had died: {walked.stale[0]}"
        if end.rewritten:
            cause, reason = "output-aliasing", "a loss that was handed out is overwritten by a later replay"
        return failure("trajectory", walked.differences, cause, reason)

    def _walked(self, conditions: tuple[str, ...]) -> _Walked:
        walked = self._travelled(conditions)
        if walked.differences and not walked.noise and (found := self._hidden(walked)):
            self.notes.append(f"one step does not show it: over several, eager ends where the arm does with {', '.join(found)}")
            self.max_ulp = max((d.max_ulp for d in walked.differences), key=lambda ulp: ulp if ulp >= 0 else math.inf)
            self.hidden = found
            return replace(walked, conditions=in_order((*conditions, *found)), differences=[])
        return walked

    def _walked_anew(self, conditions: tuple[str, ...]) -> _Walked | None:
        """None where the arm fails under these conditions, which says nothing of others."""
        before = self.side
        try:
            self._capture_anew(conditions)
            return self._walked(conditions)
        except ArmFailed as failed:
            self.notes.append(f"under {_listed(conditions)} the arm fails: {failed}")
            self.side = before
            return None

    def _hidden(self, walked: _Walked) -> tuple[str, ...]:
        """What the eager arm has to do besides, to end where this one did. One step has to agree under that as well."""
        if FIXED in walked.conditions:
            return ()
        for some in self.proving.twists_beside(walked.conditions):
            more = (*walked.conditions, *some)
            if not walked.end.unlike(self.eager.travelled(set(more) - {ALIGNED}, walked.end.replayed, 1)[0]):
                self._capture_anew(walked.conditions)
                return some if self.proving.holds_for(self.side, more) else ()
        return ()

    def _capture_anew(self, conditions: tuple[str, ...]) -> None:
        """Another subject and another arm: what walked is no longer what it was built as."""
        self.side.release()
        self.side = ArmSide(self.bench, self.bench.row.arm)
        settings = settings_of(conditions)
        with self.side.watch.entered(), self.bench.around(), draws.applied(settings):
            self.side.capture(settings)

    def _travelled(self, conditions: tuple[str, ...]) -> _Walked:
        side, lasting = self.side, set(conditions) - {ALIGNED}
        self.eager.rehearse(lasting)
        try:
            with side.watch.entered(), self.bench.around(), draws.applied(settings_of(conditions)):
                arm = side.ready()
                more: dict[str, Any] = {"cache": arm.cache, "changed": arm.invalidate, "replays": lambda: side.watch.replays}
                end = travel(self.bench, side.subject, arm, twist=PLAIN, **more)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the rehearsal was without one
            why = explain(error, None)
            raise ArmFailed(Check("trajectory", "failed", f"a step raised {why.message}", why.cause, why.where)) from None
        expected = self.eager.travelled(lasting, end.replayed, 1)[0]
        differences = end.unlike(expected)
        if FIXED in lasting:
            differences = [d for d in differences if not d.path.startswith("generator")]
        noise = self.eager.travelled(lasting, end.replayed, 2)[1].unlike(expected) if differences else []
        return _Walked(conditions, end, differences, noise, self.bench.engine.stale(side.watch.graphs) if differences else [])
