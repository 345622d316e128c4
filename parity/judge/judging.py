"""The judge of any row: which protocol it walks through depends on its mode alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from parity.judge.outcome import Outcome
from parity.rows.row import Row

if TYPE_CHECKING:
    from parity.rows.discovery import Catalogue

Report = Callable[[Outcome], None]


def judge(row: Row, catalogue: Catalogue, engine: str, seed: int = 0, report: Report | None = None) -> Outcome:
    """Judges one row in this process, by the protocol of its mode. ``engine``: cuda or emulated. ``report``: see the protocols."""
    if row.mode == "training":
        from parity.judge.training import judge as trained

        return trained(row, catalogue, engine, seed, report)
    from parity.judge.inference import judge as inferred

    return inferred(row, catalogue, engine, seed, report)
