"""What ``parity explain`` asks of a child: the row as it is judged, and, as its arm ``eager``, everything that can be learned about it.

The study judges nothing. It looks at one forward (``tour``); where that shows nothing, it looks where a replay leaves eager's
bits (``divergence``) and which cause experiments on an eager module give it; and it proposes a cut and tries it (``seams``,
``trial``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from parity.judge import judging
from parity.judge.bits import Bundle
from parity.judge.diagnose import Finding, diagnose, diagnose_between, diagnose_noise
from parity.judge.explain.calls import Reason
from parity.judge.explain.divergence import AFTER_SIZE, WEIGHTS, Divergence, first_divergence
from parity.judge.explain.seams import Proposal, propose, proven
from parity.judge.explain.tour import Tour, tour
from parity.judge.explain.training import look
from parity.judge.explain.trial import CALLS, of_forward
from parity.judge.outcome import Check, Outcome
from parity.judge.records import around, forward, snapshot
from parity.judge.script import SEQUENCE, Step
from parity.judge.subject import Bench, BrokenRow, seed_everything
from parity.judge.train.step import TrainBench
from parity.rows.row import Row
from parity.runtime.engine import engine as engine_of
from parity.runtime.errors import ParityError

if TYPE_CHECKING:
    from parity.rows.discovery import Catalogue

CHECK = "study"


def judge(row: Row, catalogue: Catalogue, engine: str, seed: int = 0, report: judging.Report | None = None) -> Outcome:
    """The arm ``eager``: a study, in the figures of its only check. Any other: the row's own outcome."""
    if row.arm != "eager":
        return judging.judge(row, catalogue, engine, seed, report)
    driver = engine_of(engine)
    try:
        with driver.entered():
            if row.mode == "training":
                figures = study_training(TrainBench(row, catalogue.training(row), driver, seed))
            else:
                with torch.no_grad():
                    figures = study(Bench(row, catalogue.family(row), driver, seed))
    except BrokenRow as error:
        return Outcome(row.id, "broken", message=f"{row.id}: {error}", seed=seed)
    return Outcome(row.id, "judged", (Check(CHECK, "passed", figures=figures),), seed=seed)


def study(bench: Bench) -> dict[str, Any]:
    """Plain data: ``reasons``, ``operations``, ``unseen``, ``stopped`` (why the forward did not end), ``finding``, ``divergence``,
    ``seam``. Raises BrokenRow where the row itself is at fault."""
    looked, expected = _look(bench)
    divergence: Divergence | None = None
    finding = Finding("")
    if not looked.reasons and not looked.error:
        divergence, finding = _replayed(bench)
    lines = {line for line in (finding.where, divergence.where if divergence else "") if line}
    seam = Proposal(())
    if looked.reasons or lines:
        seen = {line for call in looked.root.walk() for line in call.lines}
        elsewhere = divergence is not None and divergence.where not in seen
        wrong = [divergence.piece] if divergence is not None and elsewhere else []
        seam = proven(lambda refused: propose(looked, lines, refused), of_forward(bench, expected), wrong)
    elif divergence is not None or finding.cause:
        seam = Proposal((), proof="none is proposed: the line that goes wrong is not known")
    return _figures(looked, looked.reasons, seam, finding, divergence)


def study_training(bench: TrainBench) -> dict[str, Any]:
    """The same of a training step, gradients enabled; of replays, only those of the cut are looked at."""
    looked, kept, seam = look(bench)
    return _figures(looked, [*looked.reasons, *kept], seam)


def _figures(
    looked: Tour,
    reasons: Sequence[Reason],
    seam: Proposal,
    finding: Finding = Finding(""),  # noqa: B008  (frozen)
    divergence: Divergence | None = None,
) -> dict[str, Any]:
    where = finding.where or (divergence.where if divergence is not None else "")
    outside = [f"{r.cause} at {r.where.partition(' ')[0]}" for r in reasons[:3]]
    outside = outside or [f"{finding.cause or 'it goes wrong'} at {where.partition(' ')[0] or 'an unknown line'}"]
    return {
        "reasons": [asdict(reason) for reason in reasons],
        "operations": looked.root.operations,
        "unseen": list(looked.unseen),
        "stopped": looked.error,
        "finding": asdict(finding) if finding.cause else {},
        "divergence": asdict(divergence) if divergence is not None else {},
        "seam": {
            "model": seam.model,
            "code": seam.code("; ".join(outside) if reasons or divergence is not None else "the loss, and what it reads")
            if seam.pieces
            else "",
            "pieces": [asdict(piece) for piece in seam.pieces],
            "proof": seam.proof,
            "dropped": list(seam.dropped),
            "operations": round(seam.operations, 4),
            "seconds": round(seam.seconds, 4),
        },
    }


def _look(bench: Bench) -> tuple[Tour, list[Bundle]]:
    """A look at one forward, after the eager calls of CALLS, whose results come along: they fill what is built lazily, as an arm's
    warm-up does."""
    subject = bench.build()
    given: list[tuple[Any, ...]] = []

    def stand_in(*args: Any) -> Any:
        given.append(args)
        return subject.region(*args)

    call = subject.compose(stand_in)
    seed_everything(bench.seed)
    with around(bench):
        try:
            expected = [snapshot(bench, forward(bench, call, Step("replay", "call", probe))[0]) for probe in CALLS]
        except BrokenRow as error:
            raise BrokenRow(_in_training_mode(bench, error)) from error
        return tour(subject.region, given[-1], subject.module, certifies=bench.engine.certifies), expected


def _in_training_mode(bench: Bench, error: BrokenRow) -> str:
    """The error, and, where the forward works in training mode alone, that it does and what to write then."""
    subject = bench.build()
    if subject.module.training:
        return str(error)
    subject.module.train()
    try:
        forward(bench, subject.compose(subject.region), SEQUENCE[0])
    except BrokenRow:
        return str(error)
    return (
        f"{error}; in training mode it works: give a case file of that mode,\n"
        "    MODE = 'training'\n    def build(): ...\n    def probes(device): ...\n"
        "    def loss(output, *inputs):\n        return output.mean()"
    )


def _replayed(bench: Bench) -> tuple[Divergence | None, Finding]:
    try:
        divergence = first_divergence(bench)
    except ParityError as refusal:  # only a second look is refused: what the first capture of the forward met is another matter
        return None, Finding("unknown", "", str(refusal))
    if divergence is None:
        return None, Finding("")
    if divergence.noisy:
        return divergence, diagnose_noise(bench)
    if divergence.probe == WEIGHTS:
        return divergence, Finding("stale-constant", divergence.where, "what was derived from the weights is kept when they change")
    found = diagnose(bench)
    found = found if found.cause != "unknown" else diagnose_between(bench)
    if found.cause == "unknown" and divergence.call > AFTER_SIZE and bench.variant("size") is not None:
        found = Finding(
            "stale-address", divergence.where, "it goes wrong only after another size was run: something is kept for one size"
        )
    return divergence, found
