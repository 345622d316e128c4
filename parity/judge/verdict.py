"""From an outcome to a verdict: a pure function, so that every verdict can be rebuilt from evidence. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from parity.judge.outcome import CAUSES, TRAINING_CHECKS, Check, Outcome
from parity.rows.family import Expect

VERDICTS: Final = (
    "certified", "screened", "wrong", "uncapturable", "vacuous", "unstable", "not_graphed", "unproven", "unavailable", "crashed",
    "timed_out", "out_of_memory",
)  # fmt: skip
SAFE: Final = frozenset({"certified", "screened"})
_OTHER: Final = {"eager_repeat": "unstable", "input_dependence": "vacuous", "eager_step": "vacuous", "proof": "unproven"}
"""What a failed check means, where that is not ``wrong``."""


@dataclass(frozen=True)
class Verdict:
    """``cause`` is empty for the safe verdicts and never empty for the others; ``where``: the model's own file:line and code."""

    verdict: str
    cause: str = ""
    where: str = ""
    detail: str = ""
    check: str = ""

    @property
    def safe(self) -> bool:
        return self.verdict in SAFE


def _refused(check: Check) -> Verdict:
    """A capture that ran something outside the graph is wrong, not refused: its replay is missing a kernel."""
    if check.name == "capture":
        if check.figures.get("not_graphed"):
            verdict = "not_graphed"
        else:
            verdict = "wrong" if check.figures.get("executed_outside") else "uncapturable"
    else:
        verdict = _OTHER.get(check.name, "wrong")
    default = {"unstable": "nondeterministic-kernel", "vacuous": "dead-input", "not_graphed": "host-state"}.get(verdict, "unknown")
    cause = check.cause if check.cause in CAUSES else "unknown" if check.cause else default  # evidence has to be readable afterwards
    return Verdict(verdict, cause, check.where, check.detail, check.name)


def verdict_of(outcome: Outcome, engine: str) -> Verdict:
    """The verdict of one outcome on an engine: the first check that failed decides.

    Raises ValueError if nothing failed but nothing was judged either: a row without checks is not a safe one.
    """
    if outcome.status != "judged":  # a broken row is nobody's excuse for a skip: it stands beside the crashed ones
        return Verdict("crashed" if outcome.status == "broken" else outcome.status, "unknown", detail=outcome.message)
    for check in outcome.checks:
        if check.status == "failed":
            return _refused(check)
    needed = set(TRAINING_CHECKS) if any(c.name == "eager_step" for c in outcome.checks) else {"replay"}
    if missing := sorted(needed - {c.name for c in outcome.checks if c.status == "passed"}):
        raise ValueError(f"{outcome.row}: no check failed, yet no {missing[0]} was judged: this record proves nothing")
    return Verdict("certified" if engine == "cuda" else "screened")


def as_expected(verdict: Verdict, expect: Expect | None) -> bool:
    """Whether a verdict is the declared one. An unexpectedly better one is not; nor is a cause that nobody knows."""
    if expect is None:
        return verdict.safe
    if verdict.verdict != expect.verdict or (expect.check and verdict.check != expect.check):
        return False
    return verdict.cause != "unknown" and (not expect.cause or verdict.cause == expect.cause)
