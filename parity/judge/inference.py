"""The inference protocol: one row, from a fresh subject to an outcome. Runs in a child process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from parity.judge.bits import Difference
from parity.judge.outcome import Outcome
from parity.judge.records import Reference, forward, record_eager
from parity.judge.script import SEQUENCE
from parity.judge.subject import Bench, BrokenRow, apart, sensitize, state
from parity.judge.walk import Walk
from parity.rows.row import Row
from parity.runtime.engine import engine as engine_of

if TYPE_CHECKING:
    from parity.rows.discovery import Catalogue

Report = Callable[[Outcome], None]


@dataclass
class _Memory:
    """What a child remembers between rows: one reference, for the arms of one subject, and that it has run something before."""

    subject: str = ""
    reference: Reference | None = None
    warm: bool = False
    timings: dict[str, float] = field(default_factory=dict)


_MEMORY = _Memory()


def judge(row: Row, catalogue: Catalogue, engine: str, seed: int = 0, report: Report | None = None) -> Outcome:
    """Walks one row through the protocol. ``engine``: cuda or emulated. ``report`` is handed a provisional outcome before a step that
    could take the process down. Whatever is the row's own fault comes back as an outcome of status ``broken``."""
    family = catalogue.family(row)
    if family.unavailable:
        return Outcome(row.id, "unavailable", message=family.unavailable, seed=seed)
    driver = engine_of(engine)
    bench = Bench(row, family, driver, seed)
    clock = _Clock()
    try:
        with driver.entered(), torch.no_grad():
            if row.subject != _MEMORY.subject or _MEMORY.reference is None:
                _MEMORY.subject, _MEMORY.reference = row.subject, None
                with clock("reference"):
                    _MEMORY.reference = _reference(bench)
                _MEMORY.warm = True
            reference = _MEMORY.reference
            bench.patch = reference.patch
            walk = Walk(bench, reference, report)
            if reference.fit:
                with clock("arm"):
                    walk.run()
            outcome = replace(walk.outcome(), peak_memory=driver.peak_memory())
    except BrokenRow as error:
        return Outcome(row.id, "broken", message=f"{row.id}: {error}", seed=seed, seconds=clock.seconds)
    return replace(outcome, seconds=clock.seconds)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - start, 3)


def _reference(bench: Bench) -> Reference:
    """Eager, twice. Where no output moves with its input, weights are made sensitive and everything is done again."""
    if not _MEMORY.warm:  # the very first call of a process may pick other kernels than all later ones
        subject = bench.build()
        forward(bench, subject.compose(subject.region), SEQUENCE[0])
    reference = _observe(bench)
    if reference.dead and len(reference.dead) == len(reference.leaves):
        subject = bench.build()
        several = "" if bench.variant("batch") is None else "batch"  # BatchNorm on a 1 x 1 map needs more than one sample
        batches = [bench.args("A", several), bench.args("B", several)]
        bench.patch = sensitize(subject.module, subject.compose(subject.region), batches, bench.seed)
        if bench.patch:
            reference = replace(_observe(bench), patch=bench.patch, sensitized=True)
    return reference


def _observe(bench: Bench) -> Reference:
    first, second = bench.build(), bench.build()
    if (name := apart(state(first.module), state(second.module))) is not None:
        raise BrokenRow(f"build() is not deterministic: two builds with seed {bench.seed} differ in {name}; draw from torch's "
                        "default generator, which is seeded before each build")  # fmt: skip
    every = record_eager(bench, first, whole=True)
    del first
    again = record_eager(bench, second, whole=False)
    noise: list[Difference] = []
    for number, (mine, theirs) in enumerate(zip(again, every, strict=False)):
        noise += [replace(d, path=f"call {number + 1} {d.path}") for d in mine.unlike(theirs)]
    a, b = every[0].outputs, every[1].outputs
    tensors = [path for path, home in zip(a.paths, a.homes, strict=True) if home >= 0]
    if not tensors:
        raise BrokenRow("the forward returned no tensor: there is nothing to compare")
    moved = {d.path for d in b.unlike(a)} if a.paths == b.paths else set(tensors)  # what has another structure is not dead
    return Reference(every, noise, tuple(tensors), tuple(p for p in tensors if p not in moved), list(bench.probes))
