"""One certification run, shared by the doors: rows are chosen, judged in children, recorded as they finish, and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from parity.judge.outcome import Outcome
from parity.record.bench import read_benches
from parity.record.evidence import EvidenceFile, evidence_path, read_all
from parity.record.files import RecordError, unbroken
from parity.record.fresh import missing_or_stale, study_fingerprint
from parity.record.learned import EXPLAINED, FIELD, learned
from parity.record.line import CONTROLS, Record, is_expected, record_of, rerun, subject, validate
from parity.record.report import write_reports
from parity.rows.case import CASE
from parity.rows.discovery import Catalogue, DiscoveryError
from parity.rows.row import ARMS, Row
from parity.run.isolate import Options, Pool, probe
from parity.run.nursery import Nursery, RunError

STUDY: Final = "parity.judge.explain.study:judge"


def studies(rows: Sequence[Row], options: Options, warming: Nursery | None = None) -> Generator[Outcome, None, None]:
    """What children learn about rows, each in a process of its own: the arm ``eager`` is studied, any other is judged."""
    with Pool(replace(options, judge=STUDY, isolation="fork"), warming) as pool:
        yield from pool.run([[row] for row in rows])


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by subject, each group in the order graphed, native, bare: the arm most likely to leave its child clean goes first."""
    order = {arm: n for n, arm in enumerate(("eager", "graphed", "native", "bare"))}
    rows = sorted(rows, key=lambda r: (r.subject, order[r.arm]))
    return [list(group) for _, group in groupby(rows, key=lambda r: r.subject)]


def shard_of(rows: Sequence[Row], shard: str) -> list[Row]:
    """The ``i``-th of ``n`` parts (``i/n``, counted from 1), subjects kept whole. Raises ValueError."""
    number, slash, parts = shard.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise ValueError(f"shard={shard!r} must be i/n with 1 <= i <= n, such as 1/4")
    return [row for n, group in enumerate(groups_of(rows)) if n % int(parts) == int(number) - 1 for row in group]


@dataclass
class Tally:
    """What a run has come to so far. ``unexpected``: records that somebody must look at; ``survived``: controls among them."""

    verdicts: Counter[str] = field(default_factory=Counter)
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.verdicts[record["verdict"]] += 1

    def exchange(self, record: Record) -> None:
        """Puts the record, which tells more, in the place of the one of its id."""
        self.records = [record if r["id"] == record["id"] else r for r in self.records]

    @property
    def unexpected(self) -> list[Record]:
        return [r for r in self.records if not is_expected(r) and r["verdict"] != "unavailable"]

    @property
    def survived(self) -> list[Record]:
        return [r for r in self.unexpected if r["zoo"] == CONTROLS]

    @property
    def exit_code(self) -> int:
        """0 as expected, 1 a difference, 2 a control survived, or nothing that was asked for could be judged: such a run would be
        green whatever the models do (DESIGN section 9)."""
        return 2 if self.survived or self.absent else 1 if self.unexpected else 0

    @property
    def absent(self) -> bool:
        """Whether all rows but the controls are unavailable, and none is declared so."""
        asked = [r for r in self.records if r["zoo"] != CONTROLS]
        return bool(asked) and all(r["verdict"] == "unavailable" and not is_expected(r) for r in asked)


class Certification:
    """``rows`` judged on ``engine``; the environment is what a probing child reported. ``emulated``: the rows instead, where that is
    the engine. ``controls``: whether ``with_controls`` adds to them. ``reports`` None: nothing is written. ``explain``: whether refused
    rows are studied after all were judged. ``notes``: what kept a study from happening. ``left``: which of ``rows`` are not judged
    since the engine is emulated, and the options that ask for them."""

    def __init__(
        self,
        catalogue: Catalogue,
        rows: Sequence[Row],
        *,
        engine: str = "auto",
        emulated: Sequence[Row] | None = None,
        controls: bool = False,
        reports: Path | None = None,
        shard: str = "",
        resume: bool = False,
        explain: bool = False,
        **options: Any,
    ) -> None:
        self.catalogue = catalogue
        probed = probe(catalogue.sources, engine, sorted({row.zoo for row in rows} | ({CONTROLS} if controls else set())))
        self.engine: str = probed["engine"]
        self.environment: Mapping[str, Any] = probed["environment"]
        self.left = ""
        if self.engine == "emulated" and emulated is not None:
            self.left = left_out(rows, emulated)
            rows = emulated
        if controls:
            rows = with_controls(catalogue, rows)
        self.options = Options(self.engine, catalogue.sources, devices=tuple(probed["devices"]), **options)
        self.pool = Pool(self.options)
        self.reports = reports
        self.shard = shard
        self.tally = Tally()
        self.file: EvidenceFile | None = None
        self.path = evidence_path(reports, self.environment, self.engine, shard) if reports is not None else None
        self.rows = shard_of(rows, shard) if shard else list(rows)
        self.kept: list[Record] = []
        self.explain = explain
        self.notes: list[str] = []
        if resume:
            self._resume()

    def _resume(self) -> None:
        if self.path is None:
            raise ValueError("--resume reads what was recorded: it does not go with --no-reports")
        self._open()
        records = list(self.file.records.values()) if self.file is not None else []
        due = {row.id for row, _ in missing_or_stale(self.rows, records, self.catalogue.declaration, self.versions)}
        modes = {row.mode for row in self.rows if row.id in due}  # whatever is judged is judged beside the controls of its mode
        due |= {row.id for row in self.rows if row.zoo == CONTROLS and row.mode in modes}
        wanted = {row.id for row in self.rows}
        self.kept = [r for r in records if r["id"] in wanted - due]
        self.rows = [row for row in self.rows if row.id in due]

    @property
    def versions(self) -> dict[str, str]:
        return {name: facts["zoo"] for name, facts in self.environment["zoos"].items() if "zoo" in facts}

    def _open(self) -> None:
        """Opens the evidence, which mends a last line that was cut off: reading it alone would refuse such a file."""
        if self.path is not None and self.file is None:
            self.file = EvidenceFile.open(self.path)
            self.notes += self.file.messages

    def hints(self) -> dict[str, float]:
        """Seconds per row as measured before on this environment, so that long rows start first."""
        return {} if self.file is None else {key: float(record["seconds"]) for key, record in self.file.records.items()}

    def suspects(self) -> set[str]:
        """Rows declared to be unsafe here."""
        declared, versions = self.catalogue.declaration, self.versions
        return {r.id for r in self.rows if declared(r).expectation(r, self.engine, versions.get(r.zoo, "")) is not None}

    def run(self) -> Iterator[Record]:
        """Judges the rows and yields each record once it is on disk. Whatever interrupts it, what was yielded is kept and reported."""
        self._open()
        if self.reports is not None and not self.shard:
            read_all(self.reports)  # what would keep the reports from being written is told before anything is judged
            read_benches(self.reports)
        hints = self.hints()
        for record in self.kept:
            self.tally.add(record)
        try:
            with self.pool as pool:
                for outcome in pool.run(groups_of(self.rows), hints, self.suspects()) if self.rows else ():
                    yield self._record(outcome)
        finally:
            self.finish()

    def _record(self, outcome: Outcome) -> Record:
        row = Row.parse(outcome.row)
        command = rerun(row, self.engine, self.catalogue.sources)
        version = self.versions.get(row.zoo, "")
        try:
            record = record_of(
                outcome, row, self.catalogue.declaration(row), self.engine, version, command, environment=self.environment
            )
            validate(record)
        except (ValueError, TypeError) as error:
            raise RecordError(f"{row.id}: what the judge said of it is no evidence: {error}; judge it again with: {command}") from error
        with unbroken():
            if self.file is not None:
                self.file.append(record)
            self.tally.add(record)
        return record

    def owed(self, record: Record) -> bool:
        """Whether a record is to have an explanation and has none, or one that another version of the study gave."""
        if not self.explain or record["zoo"] in (CONTROLS, CASE) or record["verdict"] not in EXPLAINED:
            return False
        told: Mapping[str, Any] = record.get(FIELD, {})
        return told.get("study") != study_fingerprint()

    def unexplained(self) -> list[Row]:
        """The arm ``eager`` of each subject that is to be studied, in the order of their ids."""
        return sorted({Row.parse(r["id"]).with_arm("eager") for r in self.tally.records if self.owed(r)}, key=lambda row: row.id)

    def explanations(self) -> Iterator[list[Record]]:
        """Studies the refused subjects of what was judged, and yields the records of each, which tell more then, once they are on disk.
        No verdict changes. A study that fails says why in the explanation; where none can be made, ``notes`` says so."""
        rows = self.unexplained()
        if not rows:
            return
        self._open()
        done = 0
        try:
            with closing(studies(rows, self.options)) as told:  # no child outlives a run that is broken off
                for outcome in told:
                    done += 1
                    yield self._explained(outcome)
        except RunError as error:
            self.notes.append(f"{len(rows) - done} of {len(rows)} refused subjects are not explained: {error}")
        finally:
            self.finish()

    def _explained(self, outcome: Outcome) -> list[Record]:
        told = learned(outcome, self.engine) | {"study": study_fingerprint()}
        records = [r | {FIELD: told} for r in self.tally.records if subject(r) == Row.parse(outcome.row).subject and self.owed(r)]
        with unbroken():
            for record in records:
                if self.file is not None:
                    self.file.append(record)
                self.tally.exchange(record)
        return records

    def finish(self) -> None:
        """Compacts the evidence and rebuilds the reports from files. Safe to call twice."""
        if self.file is None:
            return
        file, self.file = self.file, None
        file.compact()
        if not self.shard and self.reports is not None:
            write_reports(self.reports)


def with_controls(catalogue: Catalogue, rows: Sequence[Row]) -> list[Row]:
    """The rows with every control of their modes before them; a catalogue without such controls is an error: nothing would prove that
    checks can fail.
    """
    if any(row.zoo == CONTROLS for row in rows):
        return list(rows)
    arms = [a for a in ARMS if a != "eager"]
    every = [r for f in catalogue.zoo(CONTROLS).families for r in f.rows() if r.arm in arms]
    modes = {row.mode for row in rows}
    if lacking := sorted(modes - {r.mode for r in every}):
        told = f"the zoo 'controls' declares no row of mode {' and '.join(lacking)}"
        raise DiscoveryError(f"{told}: a run without must-fail controls certifies nothing")
    return [*(r for r in every if r.mode in modes), *rows]


def screened(rows: Sequence[Row], modes: Sequence[str] = (), arms: Sequence[str] = ()) -> list[Row]:
    """What `parity certify` judges of a selection on the emulated engine: of ``screened_modes`` the arm ``graphed``, unless arms were
    named; all of it where that would leave nothing. Controls have every arm.
    """
    chosen = screened_modes(rows, modes)
    return [r for r in chosen if arms or r.arm == "graphed" or r.zoo == CONTROLS] or chosen


def screened_modes(rows: Sequence[Row], modes: Sequence[str] = ()) -> list[Row]:
    """Inference, unless modes were named or there is nothing else: a training row takes minutes without a GPU."""
    return [r for r in rows if modes or r.mode == "inference"] or list(rows)


def left_out(asked: Sequence[Row], judged: Sequence[Row]) -> str:
    """What of ``asked`` is not in ``judged``, and how to ask for it; empty for nothing."""
    kept = {row.id for row in judged}
    left = [row for row in asked if row.id not in kept and row.zoo != CONTROLS]
    modes = {row.mode for row in judged if row.zoo != CONTROLS}
    options = {f"--mode {row.mode}" if row.mode not in modes else f"--arm {row.arm}" for row in left}
    return f"{len(left)} row{'s' * (len(left) != 1)}; {', '.join(sorted(options))} would judge them" if left else ""
