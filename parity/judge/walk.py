"""One arm walking the script beside the eager reference, and what became of each check on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from parity.judge import census, stale
from parity.judge.arms import ARMS, Arm, EagerArm
from parity.judge.bits import Bundle, Difference
from parity.judge.diagnose import Finding, diagnose, diagnose_between, swallowed
from parity.judge.outcome import INFERENCE_CHECKS, Check, Outcome
from parity.judge.records import Record, Reference, around, between, forward, record, scale, snapshot, steps
from parity.judge.script import INFERENCE, SEQUENCE, Step
from parity.judge.subject import Bench, BrokenRow, seed_everything
from parity.judge.watch import Watch, live_tensors
from parity.rows.family import Subject
from parity.runtime.errors import CaptureRefused, StaleGraph
from parity.runtime.liveness import Read, held_tensors

_MEANS = {"weights": "stale-constant", "poison": "host-state"}
"""Checks whose failure says by itself what was wrong: weights baked in; an output handed out that no replay wrote."""


def _told(found: Finding, detail: str) -> tuple[str, str, str]:
    return found.cause, found.where, f"{detail}; {found.detail}" if found.detail else detail


class _Failed(Exception):
    def __init__(self, check: Check) -> None:
        super().__init__(check.detail)
        self.check = check


class Walk:
    """One arm, walked through the script once. ``run`` stops at the first check that fails: what comes after it is not comparable."""

    def __init__(self, bench: Bench, reference: Reference, report: Callable[[Outcome], None] | None = None) -> None:
        self.bench = bench
        self.reference = reference
        self.report = report
        self.checks: dict[str, Check] = {}
        self.notes: list[str] = []
        profiler = census.Kernels if bench.engine.certifies else None
        self.watch = Watch(profiler)
        self.first: Bundle | None = None
        self.held: list[tuple[Any, Record]] = []
        self.untouched: list[Difference] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self._dead: list[Read] = []
        self._judge_reference()

    def _judge_reference(self) -> None:
        reference = self.reference
        if reference.noise:
            worst = [str(d) for d in reference.noise[:5]]
            self._fail("eager_repeat", f"two eager sequences differ: {worst[0]}", figures={"differences": len(reference.noise),
                       "first": worst})  # fmt: skip
            return
        self._pass("eager_repeat", calls=len(SEQUENCE))
        if len(reference.dead) == len(reference.leaves):
            self._fail("input_dependence", "no output leaf differs between probes A and B, not even with weights made sensitive",
                       cause="dead-input")  # fmt: skip
            return
        self._pass("input_dependence", leaves=len(reference.leaves), dead=len(reference.dead), sensitized=reference.sensitized)

    def _pass(self, name: str, **figures: Any) -> None:
        self.checks[name] = Check(name, "passed", figures={**self.figures.get(name, {}), **figures})

    def _fail(self, name: str, detail: str, cause: str = "", where: str = "", figures: dict[str, Any] | None = None) -> None:
        self.checks[name] = Check(name, "failed", detail, cause, where, {**self.figures.get(name, {}), **(figures or {})})

    def run(self) -> None:
        bench = self.bench
        subject = bench.build()
        with self.watch.entered(), around(bench):
            seed_everything(bench.seed)
            try:
                arm: Arm = ARMS[bench.row.arm](subject)
                self._walk(arm, subject)
            except _Failed as failed:
                self.checks[failed.check.name] = failed.check

    def _walk(self, arm: Arm, subject: Subject) -> None:
        eager = EagerArm(subject)
        records = iter(self.reference.records)
        dead: list[stale.DeadRead] = []
        script = steps(self.bench, INFERENCE)
        for position, step in enumerate(script):
            if step.is_call:
                self._dead = [d.read for d in dead]
                # right before the replay: within the call the address may be handed out again and hold the old values by luck
                self.watch.around_replay = functools.partial(stale.overwritten, self.bench.engine, dead)
                self._call(arm, eager if step.action == "eager" else arm, subject, step, next(records), first=position == 0)
                dead = []
            elif step.action == "churn":
                dead = self._churn(arm, step)
            else:
                getattr(self, f"_{step.action}")(arm, subject)
            if position + 1 == len(script) or script[position + 1].check != step.check:
                self._pass(step.check)
                if step.check == "replay":
                    self._after_sequence()
        if not any(s.variant for s in script):
            self.checks["interleave"] = Check("interleave", "skipped", "the family has one legal size and one legal batch")
        if self.untouched:
            self._fail(
                "inputs_untouched",
                f"eager and this arm leave inputs differently: {self.untouched[0]}",
                "input-mutation",
            )
        else:
            self._pass("inputs_untouched")

    def _call(self, arm: Arm, call: Any, subject: Subject, step: Step, expected: Record, *, first: bool) -> None:
        died = [read for traced in arm.traces[:1] for read in traced.reads if read.dead]
        if died:
            self._warn(step, died[0])
        profile = census.Kernels() if step.profiled and self.bench.engine.certifies else None
        if profile is not None:
            profile.start()
        try:
            output, args = forward(self.bench, call, step)
        except BrokenRow as error:
            if not died:
                raise
            detail = f"a replay failed after {died[0]} had died: {error}"
            raise _Failed(Check(step.check, "failed", detail, "stale-address", died[0].where)) from None
        except CaptureRefused as refusal:
            name = "capture" if first else step.check
            raise _Failed(Check(name, "failed", refusal.message, refusal.cause, refusal.where)) from None
        except StaleGraph as error:
            raise _Failed(Check(step.check, "failed", str(error), "stale-address", "", {"stale": self._stale()[:5]})) from None
        finally:
            kernels = census.tally(profile.stop()) if profile is not None else None
        seen = record(self.bench, subject, output, args)
        if kernels is not None and expected.kernels is not None:
            self.figures["replay"] = {"kernels": kernels, "kernels_apart": census.apart(expected.kernels, kernels)}
        if first:
            self._capture_check(arm)
            self.first = seen.outputs
        if step.check == "replay":
            self.held.append((output, expected))
        differences = seen.unlike(expected)
        self.untouched += [d for d in differences if d.path.startswith("input ")]
        told = [d for d in differences if not d.path.startswith("input ")]
        if told:
            raise _Failed(self._difference(step, told, arm))
        between(self.bench, subject, step)

    def _capture_check(self, arm: Arm) -> None:
        culprits = census.culprits(self.watch.executed)
        figures: dict[str, Any] = {
            "captures": self.watch.captures,
            "replays": self.watch.replays,
            "executed_outside": culprits,
            "boundary": self.bench.row.settings.boundary,
            "derived_reads": [str(read) for traced in arm.traces for read in traced.reads],
            "unseen": sorted({name for traced in arm.traces for name in traced.unseen}),
        }
        if self.watch.captures == 0 or self.watch.replays == 0:
            detail = f"{self.watch.captures} captures and {self.watch.replays} replays: the arm ran eagerly and did not say so"
            raise _Failed(Check("capture", "failed", detail, "host-state", "", {**figures, "not_graphed": True}))
        if culprits:
            detail = f"executed during capture, so not in the graph: {', '.join(culprits)}"
            raise _Failed(Check("capture", "failed", detail, "side-stream", "", figures))
        warnings = [w for g in self.watch.graphs for w in getattr(g, "warnings", ())]
        self.notes += [w for w in warnings if w not in self.notes]
        self.checks["capture"] = Check("capture", "passed", figures=figures)

    def _after_sequence(self) -> None:
        """Held outputs and the first replay are looked at once the sequence is over."""
        other = self.reference.records[1].outputs
        assert self.first is not None
        moving = [d for d in self.first.unlike(other) if d.path not in self.reference.dead]
        if moving:
            self._pass("stale_guard")
        else:
            self._fail("stale_guard", "the first replay, of probe A, returned what eager returns for probe B", "stale-constant")
        changed = [
            replace(d, path=f"result {n + 1} {d.path}")
            for n, (output, expected) in enumerate(self.held)
            for d in snapshot(self.bench, output).unlike(expected.outputs)
        ]
        self.held.clear()
        if changed:
            raise _Failed(Check("held_outputs", "failed", f"a result already handed out changed: {changed[0]}", "output-aliasing"))
        self._pass("held_outputs", results=len(SEQUENCE))

    def _difference(self, step: Step, differences: list[Difference], arm: Arm) -> Check:
        cause, detail = "unknown", f"{step.action} {step.probe} {step.variant}".rstrip() + f": {differences[0]}"
        figures: dict[str, Any] = {"differences": len(differences), "first": [str(d) for d in differences[:5]]}
        where = ""
        if step.check == "escape":
            cause, detail = (
                "stale-address",
                f"{detail}; a cache filled during the capture: {self.figures['escape']['escaped'][:1]}",
            )
        elif step.check in _MEANS:
            cause = _MEANS[step.check]
        elif step.check == "replay":
            cause, where, detail = _told(swallowed(diagnose(self.bench), self._refusals(arm)), detail)
        if cause == "unknown" and (gone := self._stale()):
            cause, detail = "stale-address", f"{detail}; read after it had died: {gone[0]}"
            figures["stale"] = gone[:5]
            where = self._dead[0].where if self._dead else ""
        if cause == "unknown" and step.check == "replay":
            cause, where, detail = _told(diagnose_between(self.bench), detail)
        if cause == "unknown" and all(d.path.startswith("buffer ") for d in differences):
            cause = "buffer-drift"
        if cause == "unknown" and all(d.path == "generator" for d in differences):
            cause = "rng"
        return Check(step.check, "failed", detail, cause, where, {**self.figures.get(step.check, {}), **figures})

    def _refusals(self, arm: Arm) -> list[CaptureRefused]:
        """What the capture was refused, or would have been where the traced call went, though it ended well."""
        told = [CaptureRefused(v.cause, v.what, line) for t in arm.traces for v, line in t.violations]
        return [r for g in self.watch.graphs for r in getattr(g, "refused", ())] + told

    def _stale(self) -> list[str]:
        """What the last replay read after it had died: as traced where the walk knows it, else as the engine tells it."""
        return [str(read) for read in self._dead] or self.bench.engine.stale(self.watch.graphs)

    def _churn(self, arm: Arm, step: Step) -> list[stale.DeadRead]:
        dead = stale.dead(self.bench.engine, [r for t in arm.traces[:1] for r in t.reads])  # the row's own shape is what is replayed
        self.figures.setdefault(step.check, {})["dead_reads"] = [f"{d.read} ({d.fate})" for d in dead]
        gone = next((d for d in dead if d.fate == "unmapped" and not d.read.suspected), None)
        if gone is not None:
            detail = f"the graph reads memory that is not mapped any more: {gone.read}; not replayed"
            raise _Failed(Check(step.check, "failed", detail, "stale-address", gone.read.where, self.figures[step.check]))
        return dead

    def _warn(self, step: Step, read: Read) -> None:
        """Tells the parent what it means if the next replay takes the process down."""
        if self.report is not None:
            detail = f"a replay took the process down after {read} had died"
            self.checks[step.check] = Check(step.check, "failed", detail, "stale-address", read.where)
            self.report(self.outcome())
            del self.checks[step.check]

    def _poison(self, arm: Arm, subject: Subject) -> None:
        held = self.bench.engine.allocated_by(self.watch.graphs, live_tensors())
        with self.bench.engine.quiet():
            self.figures["poison"] = {"storages": stale.poison(held)}

    def _scale(self, arm: Arm, subject: Subject) -> None:
        scaled, left = scale(subject.module)
        self.figures["weights"] = {"scaled": scaled, "left_alone": left}

    def _scribble(self, arm: Arm, subject: Subject) -> None:
        statics = arm.statics()
        if statics is not None:
            known = {t.untyped_storage()._cdata for t in statics}
            candidates = [("a tensor that no module holds", t) for t in live_tensors()]
        else:
            known, candidates = set(), held_tensors(subject.module)
        named = {t.untyped_storage()._cdata: p for p, t in held_tensors(subject.module) if t.layout is torch.strided}
        mine = self.bench.engine.allocated_by(self.watch.graphs, [t for _, t in candidates])
        escaped = {t.untyped_storage()._cdata: t for t in mine if t.untyped_storage()._cdata not in known}
        paths = [named.get(key, "a tensor that no module holds") for key in escaped]
        self.figures["escape"] = {"escaped": paths}
        with self.bench.engine.quiet():
            for tensor in escaped.values():
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.untyped_storage().device).set_(tensor.untyped_storage())
                whole.copy_(stale.scrambled(whole))

    def outcome(self) -> Outcome:
        """What is known so far. Checks that were not reached are skipped, with the one that stopped the walk as the reason."""
        failed = next((c.name for c in self.checks.values() if c.status == "failed"), "")
        reason = f"not reached: {failed} failed first" if failed else "not reached"
        checks = tuple(self.checks.get(name, Check(name, "skipped", reason)) for name in INFERENCE_CHECKS)
        return Outcome(
            self.bench.row.id,
            "judged",
            checks,
            probes=tuple(self.reference.probes),
            leaves=self.reference.leaves,
            dead_leaves=self.reference.dead,
            captures=self.watch.captures,
            replays=self.watch.replays,
            seed=self.bench.seed,
            notes=tuple(self.notes),
        )
