"""Compares fresh evidence with the committed allowlist.

Pure: what to do about a finding is in its command, never done here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from parity.judge.verdict import SAFE
from parity.record.allowlist import certified, counts, environment_of, excludes, family_key, proved
from parity.record.evidence import name_of
from parity.record.grade import Grade, graded, proof_text
from parity.record.line import CONTROLS, Record, is_expected, rerun
from parity.rows.row import Row
from parity.runtime.allowlist import Allowlist, Certificate

USUAL: Final = Path("reports")
"""Where commands look for evidence and allowlist unless they are told."""

# kind -> exit code. 2: the run itself is not to be trusted; 1: somebody must look.
KINDS: Final[Mapping[str, int]] = {
    "no baseline": 2,
    "control survived": 2,
    "regression": 1,
    "class changed": 1,
    "weaker proof": 1,
    "unlisted success": 1,
    "outdated certificate": 1,
    "missing row": 1,
    "zero captures": 1,
}


@dataclass(frozen=True)
class Finding:
    """One thing that differs. ``row``: a row's id, or a family's key. ``command``: the one that settles it."""

    kind: str
    row: str
    message: str
    command: str

    @property
    def code(self) -> int:
        return KINDS[self.kind]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind}: {self.row}: {self.message}\n    {self.command}"


@dataclass(frozen=True)
class Commands:
    """What settles a finding, as it is typed where the gate ran. ``families``, ``reports``: as they were given to it. ``folder``: where
    its allowlist lies. ``evidence``: the files that it read, which the allowlist is to be built from.
    """

    families: tuple[str, ...] = ()
    reports: Path = USUAL
    folder: Path = USUAL
    evidence: tuple[Path, ...] = ()

    @property
    def update(self) -> str:
        """Takes the evidence as the new allowlist; what lies elsewhere is merged into the evidence beside it."""
        home = (self.folder / "evidence").resolve()
        elsewhere = [file for file in self.evidence if file.resolve().parent != home]
        words = ["parity", "report", *_reports(self.folder), *(word for file in elsewhere for word in ("--merge", str(file)))]
        return shlex.join(words)

    def certify(self, *words: str) -> str:
        return self._here(shlex.join(["parity", "certify", *words, "--engine", "cuda"]))

    def again(self, row: Row) -> str:
        return self._here(rerun(row, "cuda"))

    def again_or_update(self, row: Row) -> str:
        return f"{self.again(row)}  # if it is meant: {self.update}"

    def _here(self, command: str) -> str:
        words = [*(word for name in self.families for word in ("--families", name)), *_reports(self.reports)]
        return f"{command} {shlex.join(words)}".rstrip()


def _reports(folder: Path) -> list[str]:
    return ["--reports", str(folder)] if folder != USUAL else []


def gate(
    records: Iterable[Record],
    allowlist: Allowlist,
    rows: Sequence[Row],
    *,
    stale: Mapping[str, str] | None = None,
    complete: bool = False,
    commands: Commands = Commands(),
) -> list[Finding]:
    """All findings, the worst kinds first; of emulated records that there is nothing to compare them with, and no more.

    ``records``: of one environment. ``rows``: those that must have evidence; records of other rows only take a family out.
    ``stale``: row id to why its record no longer holds (``fresh.missing_or_stale``). ``complete``: ``rows`` are all
    there are, so that a certificate of a family without rows is a finding too.
    """
    stale = stale or {}
    wanted = {row.id: row for row in rows}
    declared = frozenset(family_key(vars(row)) for row in rows) if complete else None
    every = {record["id"]: record for record in records}
    name = next(map(name_of, every.values()), "")
    if any(record["engine"] != "cuda" for record in every.values()):
        told = "an emulated run screens and certifies nothing, so nothing compares with it: gate evidence of a GPU"
        return [Finding("no baseline", name, told, commands.certify())]
    last = {id_: record for id_, record in every.items() if id_ in wanted}
    findings: list[Finding] = []
    if last:
        safe = certified(every.values())
        found = {key: asked for key, rows_ in safe.items() if (asked := [r for r in rows_ if r["id"] in wanted])}
        findings += _baseline(name, list(last.values()), found, allowlist, declared, commands)
    for row in rows:
        record = last.get(row.id)
        if record is None:
            findings.append(Finding("missing row", row.id, "no evidence on this environment", commands.again(row)))
        elif row.id in stale:
            findings.append(Finding("missing row", row.id, f"its evidence no longer holds: {stale[row.id]}", commands.again(row)))
        else:
            findings += _row(row, record, commands.again(row))
    return sorted(findings, key=lambda f: list(KINDS).index(f.kind))


def _row(row: Row, record: Record, again: str) -> Iterable[Finding]:
    if record["verdict"] in SAFE and row.arm != "eager" and not (record["captures"] and record["replays"]):
        counted = f"{record['captures']} captures and {record['replays']} replays"
        told = f"{record['verdict']} with {counted}: eager was compared with itself"
        yield Finding("zero captures", row.id, told, again)
    if record["verdict"] == "unavailable" and record["expected"] != "unavailable" and row.zoo != CONTROLS:
        yield Finding("missing row", row.id, f"was not judged: {record['message'] or 'unavailable'}", again)
    if row.zoo == CONTROLS and not is_expected(record):
        must = f"{record['expected']}{_because(record['expected_cause'])}"
        told = f"must be {must}, is {record['verdict']}{_because(record['cause'])}"
        yield Finding("control survived", row.id, f"{told}: nothing else of this run is to be trusted", again)


def _baseline(
    name: str,
    records: Iterable[Record],
    safe: Mapping[str, list[Record]],
    allowlist: Allowlist,
    declared: frozenset[str] | None,
    commands: Commands,
) -> Iterable[Finding]:
    """``safe``: family key to those of the ``records`` that certify it. ``declared``: keys of all families there are, where that is
    known.
    """
    update = commands.update
    if name not in allowlist.environments:
        told = f"the allowlist has no baseline for it, only for {', '.join(allowlist.environments) or 'none at all'}"
        yield Finding("no baseline", name, told, f"{update}  # then commit {commands.folder}/")
        return
    listed = {c.id: c for c in allowlist.certificates if c.measured_on == name}
    for key, rows in safe.items():
        if key not in listed:
            yield Finding("unlisted success", key, f"certified on {name}, but not in the allowlist", update)
            continue
        for row in rows if rows[0]["mode"] == "training" else ():
            yield from _grade(name, listed[key], row, commands)
        then = listed[key].environment
        if moved := sorted({f"{n} {old!r}, now {new!r}" for row in rows for n, old, new in _moved(then, row)}):
            yield Finding("outdated certificate", key, f"was certified with {'; '.join(moved)}", update)
    for record in records:
        if _regressed(record, listed):
            why = f"was certified on {name}, is now {graded(record)}{_because(record['cause'])}"
            where = f" at {record['where']}" if record["where"] else ""
            yield Finding("regression", record["id"], why + where, commands.again_or_update(Row.parse(record["id"])))
    if declared is not None:
        for key in sorted(set(listed) - declared):
            yield Finding("missing row", key, f"is in the allowlist for {name}, but no row of it is declared any more", update)


def _regressed(record: Record, listed: Mapping[str, Certificate]) -> bool:
    """Whether a row is unsafe that its family's certificate rests on, or that may not be so beside one."""
    if not counts(record) or family_key(record) not in listed or record["verdict"] == "unavailable":
        return False
    if record["mode"] != "training":
        return bool(record["verdict"] != "certified")
    return excludes(record) or (not proved(record) and record["id"] in listed[family_key(record)].rows)


def _grade(name: str, certificate: Certificate, record: Record, commands: Commands) -> Iterable[Finding]:
    """How a certified row of training differs from what its family's certificate says of it."""
    if record["id"] not in certificate.rows:
        told = f"certified on {name}, but its family's certificate does not name it"
        yield Finding("unlisted success", record["id"], told, commands.update)
        return
    held = {grade.settings: grade for grade in map(Grade.parse, certificate.proof)}
    then, now = held.get(record["settings"]), Grade.of(record)
    if then is None:
        yield Finding("outdated certificate", record["id"], "its certificate says neither class nor proof", commands.update)
        return
    again = commands.again_or_update(Row.parse(record["id"]))
    more, told = now.weaker_than(then), f"proved by {proof_text(then.conditions)} then, by {proof_text(now.conditions)} now"
    if now.name != then.name:
        yield Finding("class changed", record["id"], f"was {then.name} on {name}, is now {now.name}; {told}", again)
    elif more:
        why = f"equal to eager only with {', '.join(more)} besides, which its certificate does not ask for"
        yield Finding("weaker proof", record["id"], f"{why}; {told}", again)
    elif then.weaker_than(now):
        why = "equal to eager under fewer conditions than its certificate says"
        yield Finding("outdated certificate", record["id"], f"{why}; {told}", commands.update)


def _moved(then: Any, record: Record) -> list[tuple[str, str, str]]:
    now = asdict(environment_of(record))
    return [(name, old, now[name]) for name, old in asdict(then).items() if old != now[name]]


def _because(cause: str) -> str:
    return f" ({cause})" if cause else ""


def render(findings: Sequence[Finding], commands: Commands = Commands(), shown: int = 3) -> str:
    """Findings for a person. Of the rows missing from one zoo and mode the first ``shown``, and one command for all of them."""
    told: list[str] = []
    missing: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        parts = finding.row.split("/")
        if finding.kind == "missing row" and len(parts) > 3:
            missing.setdefault((parts[0], parts[3]), []).append(finding)
        else:
            told.append(str(finding))
    for (zoo, mode), rows in missing.items():
        told += [str(row) for row in rows[:shown]]
        if len(rows) > shown:
            command = commands.certify("--zoo", zoo, "--mode", mode, "--resume")
            more = f"{len(rows) - shown} more of {zoo}, {mode} (--json lists them)"
            told.append(f"missing row: {more}; for all of them:\n    {command}")
    return "\n".join(told)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: as listed; 1: somebody must look; 2: the run is not to be trusted, or there is no baseline for this
    environment.
    """
    return max((finding.code for finding in findings), default=0)
