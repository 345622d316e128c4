"""What a child is lent for, what is said of a row whose child died, and the sums of it all."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parity.judge.outcome import Outcome
from parity.rows.row import Row
from parity.run.nursery import Child, how_it_ended


@dataclass
class Stats:
    """What a pool did. ``starts``: seconds per child until ready for a row. ``waiting``: seconds this process slept.

    ``rows``: those that have an outcome. ``again``: those judged again in a fresh child; ``alone``: with nothing else running.
    """

    children: int = 0
    rows: int = 0
    again: int = 0
    alone: int = 0
    waiting: float = 0.0
    starts: list[float] = field(default_factory=list)


@dataclass
class Job:
    """Rows that one child should take, in order. ``fresh``: the first needs a child that judged nothing before."""

    rows: deque[Row]
    fresh: bool = False
    alone: bool = False


@dataclass
class Lease:
    """A slot's child and what it is doing. ``deadline``: when to give it up. ``judged``: rows that it has judged."""

    device: str
    child: Child
    job: Job | None
    began: float
    deadline: float
    open: bool = True
    ready: bool = False
    reached: bool = True
    ending: bool = False
    overdue: bool = False
    judged: int = 0
    provisional: Outcome | None = None

    def obituary(self, row: Row, timeout: float, environment: Mapping[str, Any]) -> Outcome:
        """The outcome of the row that the child died at: what it had handed in before, if it had, and how it died."""
        assert self.child.status is not None
        status = "timed_out" if self.overdue else "crashed"
        how = how_it_ended(self.child.status)
        if self.overdue:
            how = f"no answer within {timeout:g} s: its process group was ended"
        if not self.ready:
            how = f"before the row began, while starting: {how}"
        words = self.child.last_words()
        message = f"{how}\n{words}" if words else how
        seconds = {"total": time.monotonic() - self.began}
        known = self.provisional
        if known is None:
            return Outcome(row.id, status, message=message, seconds=seconds, environment=environment)
        return replace(
            known,
            status=status if is_clean(known) else known.status,  # nothing had failed yet: no reason to call it safe
            message=f"{known.message}; then {message}" if known.message else message,
            seconds={**known.seconds, **seconds},
            environment=known.environment or environment,
        )


def is_clean(outcome: Outcome) -> bool:
    """Judged, and no check failed: the child that said so may judge more."""
    return outcome.status == "judged" and not any(check.status == "failed" for check in outcome.checks)
