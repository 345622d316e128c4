"""Where rows are judged: in children, never here. This process imports no torch, runs no op and asks no driver.

Rows of one subject go to one child, one after the other. A child that saw anything but a clean outcome is ended: a failed capture
poisons every later row of its process. A row that fails in a child which had judged others is judged again, in a fresh one, and only
that verdict counts. A row that runs out of memory is judged once more at the very end, with nothing else on the device.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, Final

from parity.judge.outcome import Outcome
from parity.rows.row import Row
from parity.run.lease import Job, Lease, Stats, is_clean
from parity.run.nursery import NoDevice, Nursery, RunError

ISOLATIONS: Final = ("warm", "fork", "spawn")
START_LIMIT: Final = 300.0  # seconds until a child is ready
END_LIMIT: Final = 60.0  # seconds until one that was killed is gone
GRACE: Final = 0.5  # seconds between the child's own dump of its stack and its end


@dataclass(frozen=True)
class Options:
    """Where and how rows are run.

    ``sources``: what ``rows.discovery.discover`` takes. ``slots``: children at a time per device, 0 for as many as make sense.
    ``timeout``: seconds per row. ``isolation``: ``warm`` (children take many rows), ``fork`` (one row each, imports shared), ``spawn``
    (one row each, everything imported anew). ``devices``: entries of CUDA_VISIBLE_DEVICES, empty for all that torch can use.
    ``judge``: ``module:function``. Raises ValueError.
    """

    engine: str
    sources: tuple[str, ...]
    slots: int = 0
    timeout: float = 300.0
    seed: int = 0
    isolation: str = "warm"
    devices: tuple[str, ...] = ()
    judge: str = "parity.judge.judging:judge"

    def __post_init__(self) -> None:
        if self.engine not in ("cuda", "emulated"):
            raise ValueError(f"engine={self.engine!r} is none of cuda, emulated")
        if self.isolation not in ISOLATIONS:
            raise ValueError(f"isolation={self.isolation!r} is none of {', '.join(ISOLATIONS)}")
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout:g} must be above 0 seconds")
        if self.slots < 0:
            raise ValueError(f"slots={self.slots} must be 0 (as many as make sense) or more")

    def slots_on(self, devices: Sequence[str]) -> list[str]:
        """The device of each child that may live at a time; devices take turns. Emulated: none is visible to it."""
        cpus = len(os.sched_getaffinity(0))
        if self.engine == "emulated":
            return [""] * (self.slots or cpus)
        each = self.slots or max(1, min(12, cpus - 2))
        every = [device for _ in range(each) for device in devices]
        return every if self.slots else every[: max(cpus, len(devices))]


def probe(sources: Sequence[str], engine: str = "auto", zoos: Sequence[str] = ()) -> Mapping[str, Any]:
    """``engine`` (what auto comes to), ``devices`` and ``environment``, as a child sees them; ``zoos`` empty: all.

    Raises NoDevice where ``cuda`` is demanded and there is none, RunError where the child cannot say.
    """
    if engine not in ("auto", "cuda", "emulated"):
        raise ValueError(f"engine={engine!r} is none of auto, cuda, emulated")
    settings = _settings(sources, (), "")
    task = {"engine": "auto" if engine == "cuda" else engine, "device": "" if engine == "emulated" else None, "seed": 0}
    with contextlib.closing(Nursery({**settings, "warm": ""})) as nursery:
        child = nursery.start({**settings, **task})
        found: dict[str, Any] = nursery.ask(child, {"probe": list(zoos)}, START_LIMIT)["probed"]
    if engine == "cuda" and found["engine"] != "cuda":
        raise NoDevice("the engine cuda was demanded, but torch finds no device; see CUDA_VISIBLE_DEVICES and nvidia-smi")
    return found


def warming(sources: Sequence[str], zoos: Iterable[str], judge: str) -> Nursery:
    """A server for a few rows: it imports torch, while its owner does something else, such as ``probe``, and leaves it to children to
    import what a row needs of its zoo. To be given to a pool, or closed."""
    return Nursery({**_settings(sources, zoos, judge), "warm": "torch"})


def _settings(sources: Sequence[str], zoos: Iterable[str], judge: str) -> dict[str, Any]:
    return {"sources": list(sources), "zoos": sorted(zoos), "judge": judge}


class Pool:
    """Judges rows in children. A context manager: on leaving it, whatever happened, no process is left."""

    def __init__(self, options: Options, warming: Nursery | None = None) -> None:
        """``warming``: see there; for these rows' zoos and this judge, whose children are forked. It ends with the pool."""
        self.options = options
        self.stats = Stats()
        self._devices = options.devices
        self._warming = warming
        self._nursery: Nursery | None = None
        self._warmed: frozenset[str] = frozenset()
        self._leases: dict[int, Lease] = {}
        self._free: list[str] = []
        self._jobs: deque[Job] = deque()
        self._suspects: frozenset[str] = frozenset()
        self._alone: deque[Job] = deque()
        self._environments: dict[str, Mapping[str, Any]] = {}
        self._entered = False

    def __enter__(self) -> Pool:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        self._end_everything()

    def run(
        self, groups: Sequence[Sequence[Row]], hints: Mapping[str, float] | None = None, suspects: Iterable[str] = ()
    ) -> Iterator[Outcome]:
        """Outcomes in order of completion. A group: rows of one subject. ``hints``: row id to seconds; long groups first.
        ``suspects``: ids of rows that are expected to fail; they go to a fresh child at once, since only such a one counts then.

        Raises RunError where the run cannot go on; what was yielded stays valid. Closing the iterator kills what runs.
        """
        if not self._entered or self._leases:
            raise RuntimeError("a pool runs inside its with statement, one run at a time")
        if self.options.engine == "cuda" and not self._devices:
            self._devices = tuple(probe(self.options.sources, "cuda")["devices"])
        self._open(frozenset(row.zoo for group in groups for row in group))
        self._free = self.options.slots_on(self._devices)
        self._suspects = frozenset(suspects)
        self._jobs = self._queue(groups, hints or {})
        self._alone = deque()
        finished = False
        try:
            while self._jobs or self._alone or self._leases:
                self._dispatch()
                yield from self._step()
            finished = True
        finally:
            if not finished:
                self._end_everything()

    def _open(self, zoos: frozenset[str]) -> None:
        if self._nursery is not None and not zoos <= self._warmed:
            self._end_everything()
        if self._nursery is None:
            self._nursery, self._warming = self._warming, None
            warm = "" if self.options.isolation == "spawn" else "whole"
            self._nursery = self._nursery or Nursery({**_settings(self.options.sources, zoos, self.options.judge), "warm": warm})
            self._warmed = zoos

    def _queue(self, groups: Sequence[Sequence[Row]], hints: Mapping[str, float]) -> deque[Job]:
        usual = sum(hints.values()) / len(hints) if hints else 0.0
        if self.options.isolation != "warm":
            groups = [[row] for group in groups for row in group]
        longest_first = sorted(groups, key=lambda group: -sum(hints.get(row.id, usual) for row in group))
        return deque(Job(deque(group), fresh=group[0].id in self._suspects) for group in longest_first if group)

    def _dispatch(self) -> None:
        """Gives jobs to idle children and to new ones, as far as there are slots; ends children that nobody needs."""
        while self._jobs:
            job = self._jobs[0]
            idle = [lease for lease in self._leases.values() if lease.job is None and not lease.ending]
            fit = next((lease for lease in idle if not (job.fresh and lease.judged)), None)
            if fit is not None:
                self._next(fit, self._jobs.popleft())
            elif self._free:
                self._start(self._jobs.popleft())
            else:
                for lease in idle[:1]:
                    self._end(lease)
                return
        if any(lease.job for lease in self._leases.values()):
            return
        for lease in self._leases.values():
            self._end(lease)
        if self._alone and not self._leases:
            self.stats.alone += 1
            self._start(self._alone.popleft())

    def _start(self, job: Job) -> None:
        assert self._nursery is not None
        device = self._free.pop(0)
        task = {"engine": self.options.engine, "device": device, "seed": self.options.seed}
        child = self._nursery.start({**_settings(self.options.sources, [job.rows[0].zoo], self.options.judge), **task})
        now = time.monotonic()
        self._leases[child.number] = Lease(device, child, job, began=now, deadline=now + START_LIMIT)
        self.stats.children += 1

    def _next(self, lease: Lease, job: Job) -> None:
        """Sends a job's first row. If the child is dead already, its end is on the way, and the row is judged elsewhere."""
        lease.job, lease.provisional, lease.began = job, None, time.monotonic()
        lease.deadline = lease.began + self.options.timeout + GRACE
        lease.reached = lease.child.send({"row": job.rows[0].id, "timeout": self.options.timeout})

    def _end(self, lease: Lease) -> None:
        assert self._nursery is not None
        if not lease.ending:
            lease.ending = True
            lease.deadline = time.monotonic() + END_LIMIT
            self._nursery.end(lease.child)

    def _step(self) -> Iterator[Outcome]:
        """Waits until something happens or a deadline passes, and deals with it. Messages count before deadlines do."""
        assert self._nursery is not None
        if not self._leases:
            return
        began = time.monotonic()
        first = min(lease.deadline for lease in self._leases.values())
        sockets = [lease.child.connection for lease in self._leases.values() if lease.open]
        wait([self._nursery.control, *sockets], None if first == math.inf else max(0.0, first - began))
        self.stats.waiting += time.monotonic() - began
        ended = self._nursery.news()
        for lease in list(self._leases.values()):
            lease.open = lease.open and lease.child.receive()
            yield from self._listen(lease)
        for child in ended:
            yield from self._bury(self._leases[child.number])
        for lease in self._leases.values():
            if time.monotonic() <= lease.deadline:
                continue
            if lease.ending:
                raise RunError(f"process {lease.child.pid} does not end, though it was killed: a driver call may hang")
            lease.overdue = True
            self._end(lease)

    def _listen(self, lease: Lease) -> Iterator[Outcome]:
        while lease.child.inbox and lease.job is not None:
            message = lease.child.inbox.pop(0)
            row = lease.job.rows[0]
            if "ready" in message:
                lease.ready = True
                self.stats.starts.append(message["ready"])
                self._next(lease, lease.job)
            elif "environment" in message:
                self._environments[row.zoo] = message["environment"]
            elif "provisional" in message:
                lease.provisional = Outcome.from_dict(message["provisional"])
            elif "outcome" in message:
                yield from self._conclude(lease, Outcome.from_dict(message["outcome"]), message["touched"])
            elif not message["out_of_memory"]:
                raise RunError(message["failed"])
            else:
                yield from self._conclude(lease, Outcome(row.id, "out_of_memory", message=message["failed"]))

    def _bury(self, lease: Lease) -> Iterator[Outcome]:
        """A child is gone: its slot is free, and the row that it was at gets an outcome from here."""
        assert self._nursery is not None
        lease.ending = True
        if lease.job is not None and not lease.reached:  # it had died before it got the row
            self._jobs.appendleft(lease.job)
        elif lease.job is not None:
            environment = self._environments.get(lease.job.rows[0].zoo, {})
            died = lease.obituary(lease.job.rows[0], self.options.timeout, environment)
            yield from self._conclude(lease, replace(died, seed=self.options.seed))
        del self._leases[lease.child.number]
        self._nursery.forget(lease.child)
        self._free.append(lease.device)

    def _conclude(self, lease: Lease, outcome: Outcome, touched: bool = True) -> Iterator[Outcome]:
        """Whether an outcome counts; what becomes of the child and of the rest of its job. ``touched``: the judge ran."""
        job, lease.job = lease.job, None
        assert job is not None
        fresh, clean = lease.judged == 0, is_clean(outcome)
        lease.judged += touched
        lease.deadline = math.inf
        counts = False
        if outcome.status == "out_of_memory" and not job.alone:
            self._alone.append(Job(deque([job.rows.popleft()]), alone=True))
        elif touched and not clean and not fresh:
            job.fresh = True
            self.stats.again += 1
        else:
            job.rows.popleft()
            job.fresh, counts = bool(job.rows) and job.rows[0].id in self._suspects, True
        keep = (clean or not touched) and self.options.isolation == "warm" and not job.alone and not lease.ending
        if not keep:
            self._end(lease)
        if job.rows and keep and not job.fresh:
            self._next(lease, job)
        elif job.rows:
            self._jobs.appendleft(job)
        if counts:
            self.stats.rows += 1
            yield outcome

    def _end_everything(self) -> None:
        self._leases.clear()
        for nursery in (self._nursery, self._warming):
            if nursery is not None:
                nursery.close()
        self._nursery = self._warming = None
