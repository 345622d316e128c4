"""The training protocol: one row, from a fresh subject to an outcome. Runs in a child process.

Eager's runs come first, from one saved state: five, of which the first is thrown away. Then the arm, captured, from the same state.
What differs in bits is sorted, and explained by changed conditions under which nothing differs; under those it walks a trajectory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity.judge.outcome import Outcome
from parity.judge.subject import BrokenRow
from parity.judge.train.sides import EagerSide, Remembered
from parity.judge.train.step import TrainBench
from parity.judge.train.walk import TrainWalk
from parity.rows.row import Row
from parity.runtime.engine import engine as engine_of

if TYPE_CHECKING:
    from parity.rows.discovery import Catalogue

Report = Callable[[Outcome], None]


@dataclass
class _Memory:
    """What a child remembers between rows, for the arms of one subject: eager's side, and the ``first`` build, on the host."""

    subject: str = ""
    eager: Remembered = field(default_factory=Remembered)
    first: dict[str, Tensor] | None = None


_MEMORY = _Memory()


def judge(row: Row, catalogue: Catalogue, engine: str, seed: int = 0, report: Report | None = None) -> Outcome:
    """Walks one row through the protocol. ``engine``: cuda or emulated. ``report``: as in the protocol of inference; nothing here is
    known to take the process down. Whatever is the row's own fault comes back as an outcome of status ``broken``; short memory, as
    ``out_of_memory``, with the phase it happened in."""
    family = catalogue.training(row)
    if family.unavailable:
        return Outcome(row.id, "unavailable", message=family.unavailable, seed=seed)
    driver = engine_of(engine)
    clock = Clock()
    if _MEMORY.subject != row.subject:
        _MEMORY.subject, _MEMORY.eager, _MEMORY.first = row.subject, Remembered(), None
    bench = TrainBench(row, family, driver, seed, first=_MEMORY.first)
    try:
        with driver.entered():
            walk = TrainWalk(bench, EagerSide(bench, _MEMORY.eager), clock)
            walk.run()
            _MEMORY.first = bench.first
            outcome = replace(walk.outcome(), peak_memory=driver.peak_memory())
    except BrokenRow as error:
        _MEMORY.subject = ""
        return Outcome(row.id, "broken", message=f"{row.id}: {error}", seed=seed, seconds=clock.seconds)
    except (MemoryError, torch.OutOfMemoryError) as error:
        _MEMORY.subject, _MEMORY.eager = "", Remembered()
        message = f"{row.id}: out of memory during {clock.phase}: {error}"
        return Outcome(row.id, "out_of_memory", message=message, seed=seed, seconds=clock.seconds)
    return replace(outcome, seconds=clock.seconds)


class Clock:
    """``seconds`` per phase, and the ``phase`` under way."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.phase = "the build"

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.phase = f"the {name}"
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)
