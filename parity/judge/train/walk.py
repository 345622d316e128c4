"""One arm of a training row, from the eager quorum to the trajectory, and what became of each check on the way."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from parity.judge.bits import Difference
from parity.judge.counterfactual import draws
from parity.judge.counterfactual.conditions import CONDITIONS
from parity.judge.counterfactual.search import Proof, Search, class_of
from parity.judge.outcome import TRAINING_CHECKS, Check, Outcome
from parity.judge.subject import BrokenRow
from parity.judge.train.causes import cause_of, failure, traced_cause
from parity.judge.train.comparison import Comparison, Found, Run, compared
from parity.judge.train.journey import Journey
from parity.judge.train.proving import ARM_RUNS, QUORUM, Proving
from parity.judge.train.sides import ArmFailed, ArmSide, EagerSide, Vacuous
from parity.judge.train.sort import LEVEL, joint_p_value
from parity.judge.train.step import TrainBench, probes


class TrainWalk:
    """``run`` stops at the first check that fails; what was not reached is skipped, with that as the reason."""

    def __init__(
        self,
        bench: TrainBench,
        eager: EagerSide,
        clock: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.bench = bench
        self.eager = eager
        self.clock = clock
        self.checks: dict[str, Check] = {}
        self.told: dict[str, Any] = {"class": "", "proof": [], "cause": "", "seam": bench.family.seam,
                                     "mechanism": bench.family.mechanism}  # fmt: skip
        self.notes: list[str] = []
        self.side: ArmSide | None = None
        self.proving: Proving | None = None
        self.leaves: tuple[str, ...] = ()
        self.proof: tuple[str, ...] = ()

    def run(self) -> None:
        try:
            with self.clock("eager quorum"):
                runs = self._quorum()
        except Vacuous as nothing:
            self.checks["eager_step"] = Check("eager_step", "failed", str(nothing), "dead-input")
            return
        try:
            with self.clock("arm"):
                safe = self._step(runs)
            if safe:
                with self.clock("trajectory"):
                    self._trajectory()
        except ArmFailed as failed:
            self.checks[failed.check.name] = failed.check
            self.told["class"] = ""

    # ------------------------------------------------------------ eager
    def _quorum(self) -> list[Run]:
        runs = self.eager.runs((), QUORUM)
        first = runs[0]
        for run in runs[1:]:
            for step, (mine, theirs) in enumerate(zip(run, first, strict=True)):
                if mine.outputs.kinds != theirs.outputs.kinds or mine.outputs.paths != theirs.outputs.paths:
                    raise BrokenRow(f"the network's outputs change structure from one eager run to the next (batch {step + 1})")
        if first[0].outputs.paths != first[1].outputs.paths:
            raise BrokenRow("the network's outputs change structure from batch A to batch B")
        self._alive(first)
        within = compared(runs, [])
        self.leaves = first[0].outputs.paths
        self.told["quorum"] = {"runs": QUORUM, "varying": len(within.found)}
        self.checks["eager_step"] = Check(
            "eager_step", "passed", figures={"runs": QUORUM, "steps": len(first), "varying": len(within.found)}
        )
        return runs

    def _alive(self, run: Run) -> None:
        """Raises Vacuous where equal bits would say nothing."""
        for step in run:
            loss = dict(step.loss.leaves())["loss"]
            if not math.isfinite(float(loss)):
                raise Vacuous(f"the loss is {float(loss)} in eager already")
        gradients = [g for _, g in run[0].gradients.leaves() if isinstance(g, Tensor)]
        if not gradients:
            raise Vacuous("no parameter gets a gradient")
        if not any(bool(g.any()) for g in gradients):
            raise Vacuous("every gradient is zero")
        if not any(bool(g.isfinite().all()) for g in gradients):
            raise Vacuous("no gradient is finite in eager already")
        if run[0].loss.same(run[1].loss) and run[0].outputs.same(run[1].outputs):
            raise Vacuous("neither the loss nor an output differs between batches A and B")

    # ------------------------------------------------------------ one step
    def _step(self, runs: list[Run]) -> bool:
        """The checks of one step; whether the arm is safe so far."""
        self.side = side = ArmSide(self.bench, self.bench.row.arm)
        with side.watch.entered():
            with self.bench.around():
                side.capture()
                self.checks["capture"] = Check("capture", "passed", figures=side.figures())
                arm = side.runs(ARM_RUNS)
            self.proving = proving = Proving(
                self.bench, self.eager, side, compared(runs, arm, measured=True), compared(runs, [side.at_capture])
            )
            self._tell(proving.comparison)
            if proving.comparison.exact and proving.at_capture.exact:
                self._pass_step()
                self.told["class"] = "exact"
                return True
            if proving.own_stream():
                self.proof = (draws.FIXED,)
                name, cause = class_of(None, eager_is_stable=True, max_ulp=-1, rng_alignable=False)
                self.told |= {"class": name, "cause": cause, "proof": list(self.proof)}
                self._pass_step(conditions=list(self.proof))
                return True
            fail = functools.partial(self._fail_step, eager=runs[0])
            if beyond := proving.beyond():
                fail(beyond, arm=arm[-1] if proving.comparison.found else side.at_capture)
                return False
            if proving.only_accumulation():
                reason = "the gradients of each batch alone are eager's"
                fail(proving.comparison.found, arm=arm[-1], why=("grad-accumulation", reason))
                return False
            with self.clock("search"):
                found = proving.find()
            self.notes += proving.notes
            self.told["tried"] = [{"conditions": list(t.conditions), "differing": t.differing} for t in found.tried]
            if found.proof is not None:
                self._proved(found.proof, proving)
                return True
            if self._certain(proving.comparison) or not proving.comparison.found:
                fail(self._certain(proving.comparison) or proving.at_capture.found,
                     arm=arm[-1] if proving.comparison.found else side.at_capture)  # fmt: skip
            else:
                self.told |= {"cause": "nondeterministic-kernel", "ops": proving.blamed_ops(None)}
                self._unproven(proving.comparison, found)
            return False

    def _certain(self, comparison: Comparison) -> list[Found]:
        """What eager always does alike, and this arm otherwise; else everything, where it lies apart from eager's noise."""
        p_value = self.told["p_value"]
        apart = p_value is not None and p_value <= LEVEL
        return [f for f in comparison.found if not f[2].noisy] or (comparison.found if apart else [])

    def _pass_step(self, **figures: Any) -> None:
        for name in ("loss", "outputs", "buffers", "gradients", "rng", "accumulation"):
            self.checks[name] = Check(name, "passed")
        self.checks["proof"] = Check("proof", "passed", figures=figures)

    def _proved(self, proof: Proof, proving: Proving) -> None:
        stable = self.told["quorum"]["varying"] == 0
        self.proof = proof.conditions
        name, cause = class_of(proof, eager_is_stable=stable, max_ulp=self.told["max_ulp"])
        ops = proving.blamed_ops(proof) if cause == "nondeterministic-kernel" else []
        self.told |= {"class": name, "cause": cause, "proof": list(proof.conditions), "minimal": proof.minimal, "ops": ops}
        self._pass_step(conditions=list(proof.conditions), differing=len(proving.comparison.found))

    def _unproven(self, comparison: Comparison, found: Search) -> None:
        self._pass_step()
        tried = "; the search was cut short" if found.cut else ""
        worst = next((t.apart for _, _, t in comparison.found if t.apart is not None), None)
        detail = f"differs within eager's own noise, and no set of {len(found.tried)} takes it away{tried}: {worst}"
        self.checks["proof"] = Check("proof", "failed", detail, "nondeterministic-kernel")

    def _fail_step(self, found: list[Found], *, eager: Run, arm: Run, why: tuple[str, str] | None = None) -> None:
        """The check of every part among ``found`` fails; the others pass."""
        assert self.side is not None
        steps = probes(self.bench.family.accumulate)
        stale = self.bench.engine.stale(self.side.watch.graphs)
        where = ""
        cause, reason = why or cause_of(found, eager, arm, self.eager.remembered.changes, stale)
        if cause in _TRACED:
            told = traced_cause(self.bench)
            if cause == "unknown":
                cause, reason = told.cause, told.detail
            elif cause == told.cause == "stale-address":
                reason = f"{reason}; {told.detail}"
            where = told.where if told.cause == cause else ""
        self.told["cause"] = cause
        self._pass_step()
        self.checks["proof"] = Check("proof", "skipped", "not reached: the step itself is wrong")
        failed: dict[str, list[Difference]] = {}
        for step, part, tensor in found:
            if tensor.apart is not None:
                name = "accumulation" if part == "gradients" and not steps[step][1] else part
                failed.setdefault(name, []).append(tensor.apart)
        assert failed, "a step that is wrong has something wrong"
        for name, differences in failed.items():
            self.checks[name] = failure(name, differences, cause, reason, where)

    def _tell(self, comparison: Comparison) -> None:
        differences = [d for part, d in comparison.differences if part != "rng"]
        # what has no ULPs, a whole number say, lies further apart than any that has
        worst = max(differences, key=lambda d: d.max_ulp if d.max_ulp >= 0 else math.inf, default=None)
        self.told |= {
            "tensors": [comparison.differing_gradients, comparison.gradients],
            "sorting": comparison.sorting,
            "max_ulp": worst.max_ulp if worst is not None else 0,
            "worst": worst.path if worst is not None else "",
            "p_value": joint_p_value([t for _, part, t in comparison.found if part != "rng"]),
        }

    # ------------------------------------------------------------ several steps
    def _trajectory(self) -> None:
        assert self.side is not None
        assert self.proving is not None
        journey = Journey(self.bench, self.eager, self.side, self.proving)
        try:
            check = journey.walk(self.proof)
        finally:
            self.side = journey.side
            self.told["trajectory"] = journey.figures
            self.notes += journey.notes
        self.checks[check.name] = check
        if check.status == "failed":
            self.told["class"] = ""
        elif journey.hidden:
            conditions = tuple(journey.figures["conditions"])
            causes = tuple(dict.fromkeys(c.cause for c in CONDITIONS if c.name in conditions))
            self.told["max_ulp"] = max(self.told["max_ulp"], journey.max_ulp, key=lambda ulp: ulp if ulp >= 0 else math.inf)
            self._proved(Proof(conditions, causes, minimal=len(conditions) == 1), self.proving)

    def outcome(self) -> Outcome:
        failed = next((name for name in TRAINING_CHECKS if self.checks.get(name, _NONE).status == "failed"), "")
        reason = f"not reached: {failed} failed first" if failed else "not reached"
        watch = self.side.watch if self.side is not None else None
        return Outcome(
            self.bench.row.id,
            "judged",
            tuple(self.checks.get(name, Check(name, "skipped", reason)) for name in TRAINING_CHECKS),
            probes=self._drawn(),
            leaves=self.leaves,
            captures=watch.captures if watch is not None else 0,
            replays=watch.replays if watch is not None else 0,
            seed=self.bench.seed,
            notes=tuple(self.notes),
            training=self.told,
        )

    def _drawn(self) -> tuple[dict[str, Any], ...]:
        """What the network was given of both batches: a certificate is held to that, a runtime sees no more."""
        first = next(iter(self.eager.remembered.runs.get((), [])), [])
        return tuple(
            {"probe": p, "seed": self.bench.seed, **given} for p, step in zip("AB", first, strict=False) for given in step.given
        )


_NONE = Check("", "skipped")
_TRACED = frozenset({"unknown", "stale-address", "python-counter"})
"""Causes of which the network's forward knows more, the line above all."""
