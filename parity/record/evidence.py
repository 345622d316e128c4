"""Evidence files: one per environment, a row a line, appended as rows finish. A line that is not ours is an error, never skipped.

A line is written by one ``write`` under a lock and synced. A process killed inside that write leaves a last line
without its end: reading such a file is an error that names the repair; opening it to append completes the line where it
is whole, and otherwise moves it to ``<file>.partial``, so that no finished row is lost and no broken one counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parity.record.files import FULL, RecordError, sync_folder, write_atomic, write_error
from parity.record.line import Record, environment_name, mark_healed, validate


def evidence_path(reports: str | Path, environment: Mapping[str, Any], engine: str, shard: str = "") -> Path:
    """Where an environment's evidence lies. ``shard``: ``1/3`` gives a file of its own, to be merged later."""
    suffix = f".shard-{shard.replace('/', '-of-')}" if shard else ""
    return Path(reports) / "evidence" / f"{environment_name(environment, engine)}{suffix}.jsonl"


def evidence_of(reports: str | Path, name: str) -> list[Path]:
    """The files that hold an environment's evidence, shards included."""
    folder = Path(reports) / "evidence"
    return sorted([*folder.glob(f"{name}.jsonl"), *folder.glob(f"{name}.shard-*.jsonl")])


def name_of(record: Mapping[str, Any]) -> str:
    """The environment a record belongs to."""
    return environment_name(record["environment"], record["engine"])


def render(records: Iterable[Mapping[str, Any]]) -> str:
    """The text of an evidence file: a line a record, sorted by id, keys in order."""
    return "".join(_line(record) for record in sorted(records, key=lambda record: str(record["id"])))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _record(line: bytes) -> Record:
    """Raises ValueError with a sentence for anything that is not one valid record."""
    try:
        record: Record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}): restore the file from version control, or take the line out") from None
    validate(record)
    return record


def _parse(path: Path, data: bytes) -> dict[str, Record]:
    found: dict[str, Record] = {}
    first = ""
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = _record(line)
            name = name_of(record)
            if first and name != first:
                raise ValueError(f"row {record['id']}: measured on {name}, the lines above on {first}: one file per environment")
        except ValueError as error:
            raise RecordError(f"{path}:{number}: {error}") from None
        first = name
        found[record["id"]] = record
    return found


def read_evidence(path: str | Path) -> list[Record]:
    """The records of a file, the last of each id, sorted by id. Raises RecordError naming file and line."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RecordError(f"{path}: no such evidence; `parity certify` writes it") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror or error})") from error
    if data and not data.endswith(b"\n"):
        number = data.count(b"\n") + 1
        raise RecordError(
            f"{path}:{number}: the last line was cut off while it was written; `parity certify --resume` moves it to "
            f"{path.name}.partial and runs its row again"
        )
    found = _parse(path, data)
    return [found[key] for key in sorted(found)]


def read_all(reports: str | Path) -> dict[str, list[Record]]:
    """Every environment's records, by name. Shards of one environment count together.

    Raises RecordError; no evidence is one too.
    """
    folder = Path(reports) / "evidence"
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise RecordError(f"{folder}: no evidence here; `parity certify --reports {shlex.quote(str(reports))}` writes it")
    grouped: dict[str, list[list[Record]]] = {}
    for path in paths:
        if records := read_evidence(path):
            grouped.setdefault(name_of(records[0]), []).append(records)
    return {name: latest(groups) for name, groups in sorted(grouped.items())}


def latest(groups: Iterable[Iterable[Record]]) -> list[Record]:
    """Of each id the record taken last (of equal times the later group's), sorted by id, with ``healed`` drawn over all
    arms.
    """
    found: dict[str, Record] = {}
    for group in groups:
        for record in group:
            held = found.get(record["id"])
            if held is None or record["recorded"] >= held["recorded"]:
                found[record["id"]] = record
    return mark_healed(found[key] for key in sorted(found))


def merge(paths: Sequence[str | Path], into: str | Path) -> list[Record]:
    """Joins evidence files of one environment (``--shard i/n``) into one, replaced as a whole; ``into`` counts too
    where it exists.

    Raises RecordError, and then leaves ``into`` as it was.
    """
    target = Path(into)
    sources = [Path(p) for p in paths]
    if target.exists() and target not in sources:
        sources.insert(0, target)
    groups = [read_evidence(path) for path in sources]
    names = {name_of(record): path for path, group in zip(sources, groups, strict=True) for record in group[:1]}
    if len(names) > 1:
        told = "; ".join(f"{path} is of {name}" for name, path in sorted(names.items()))
        raise RecordError(f"{target}: evidence of several environments does not merge: {told}")
    merged = latest(groups)
    write_atomic(target, render(merged))
    return merged


class EvidenceFile:
    """One environment's evidence, open for appending. ``records``: id to record.

    ``messages``: what opening had to repair.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self.messages: list[str] = []

    @classmethod
    def open(cls, path: str | Path) -> EvidenceFile:
        """Reads what is there, or starts a new file.

        Raises RecordError for a line that is not ours; nothing is then changed.
        """
        file = cls(Path(path))
        try:
            file.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(file.path, error) from error
        with file._locked() as descriptor:
            data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            whole, _, rest = data.rpartition(b"\n")
            file.records = _parse(file.path, whole + b"\n" if whole else b"")
            if rest:
                file._repair(descriptor, rest, len(data) - len(rest))
        sync_folder(file.path.parent)
        return file

    def _repair(self, descriptor: int, rest: bytes, end: int) -> None:
        number = os.pread(descriptor, end, 0).count(b"\n") + 1
        try:
            record = _record(rest)
        except ValueError:
            beside = self.path.with_name(self.path.name + ".partial")
            try:
                with beside.open("ab") as file:
                    file.write(rest + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.ftruncate(descriptor, end)
            except OSError as error:
                raise write_error(beside, error) from error
            self.messages.append(
                f"{self.path}:{number}: the last line was cut off; moved to {beside.name}, its row is missing until it runs"
            )
        else:
            self._write(descriptor, b"\n")
            self.records[record["id"]] = record
            self.messages.append(f"{self.path}:{number}: the last line lacked its end, and was whole otherwise; completed")

    def append(self, record: Record) -> None:
        """Adds one record, synced to the disk. A later one of the same id replaces the earlier.

        Raises RecordError, ValueError.
        """
        validate(record)
        line = _line(record).encode()
        held = next(iter(self.records.values()), None)
        if held is not None and name_of(held) != name_of(record):
            raise RecordError(f"{self.path}: holds evidence of {name_of(held)}; {record['id']} was measured on {name_of(record)}")
        with self._locked() as descriptor:
            self._write(descriptor, line)
        self.records[record["id"]] = json.loads(line)

    def compact(self) -> None:
        """Rewrites the file sorted, the last record of each id alone, ``healed`` drawn over all arms.

        Raises RecordError.
        """
        with self._locked():
            found = _parse(self.path, self.path.read_bytes())  # what other processes appended meanwhile stays too
            records = mark_healed(found[key] for key in sorted(found))
            write_atomic(self.path, render(records))
            self.records = {record["id"]: record for record in records}

    def _write(self, descriptor: int, data: bytes) -> None:
        """All of ``data`` or nothing of it."""
        size = os.fstat(descriptor).st_size
        try:
            if (written := os.write(descriptor, data)) != len(data):
                os.ftruncate(descriptor, size)
                raise self._full(written, len(data))
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            if error.errno in FULL:
                raise self._full(0, len(data)) from error
            raise write_error(self.path, error) from error

    def _full(self, written: int, wanted: int) -> RecordError:
        return RecordError(
            f"{self.path}: the disk is full ({written} of {wanted} bytes fitted); every row is kept, "
            "make room and go on with `parity certify --resume`"
        )

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, locked; opened again where another process replaced it while this one waited."""
        while True:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise write_error(self.path, error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self.path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
