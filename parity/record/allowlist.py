"""Writes SUPPORTS_CUDA_GRAPH.json from evidence: certified families only, the same text for the same evidence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parity.record.evidence import name_of
from parity.record.files import write_atomic
from parity.record.grade import Grade, weakest
from parity.record.line import CONTROLS, Record, census, figures
from parity.rows.row import Settings
from parity.runtime.allowlist import SCHEMA, Allowlist, Certificate, Environment, Tried, arch_name, checksum

ABOUT = "Families whose replay was bit-identical to eager. `parity report` writes this from evidence; never edit."
SILENT = frozenset({"unavailable", "timed_out", "out_of_memory"})  # verdicts that say nothing about a family


def family_key(record: Mapping[str, Any]) -> str:
    """What a certificate is about: ``zoo/family/task/mode``."""
    return "/".join(str(record[name]) for name in ("zoo", "family", "task", "mode"))


def counts(record: Mapping[str, Any]) -> bool:
    """Whether a record can make or break a certificate: our runtime, a real device, the family's own boundary, no
    control.
    """
    own = not Settings.parse(record["settings"]).boundary
    return own and record["arm"] == "graphed" and record["engine"] == "cuda" and record["zoo"] != CONTROLS


def proved(record: Mapping[str, Any]) -> bool:
    """Certified, by a graph that was captured and replayed, at shapes that a caller can be held to; of training also of a class that
    is proved.
    """
    judged = record["verdict"] == "certified" and record["captures"] and record["replays"] and record["tried"]
    if not judged or record["mode"] != "training":
        return bool(judged)
    return bool(record["class"] == "exact" or (record["proof"] and record["class"] != "own_rng"))  # other numbers are other bits


def certified(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Family key to its certified rows, of one environment.

    One row of inference that is unsafe takes the whole family out: another size of it may be right and its graphs still be wrong for
    the caller who mixes sizes. Rows of training are runs of their own, one per dtype: each counts for itself, but for one that is
    ``wrong``. What gives wrong gradients there (a stale buffer, a doubled sum) is no matter of rounding, so it takes the family out.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if counts(record) and record["verdict"] not in SILENT:
            groups.setdefault(family_key(record), []).append(record)
    found = {}
    for key, group in sorted(groups.items()):
        safe = [record for record in group if proved(record)]
        spoiled = any(excludes(record) for record in group)
        if safe and not spoiled:
            found[key] = safe
    return found


def excludes(record: Mapping[str, Any]) -> bool:
    """Whether a row that counts takes its whole family out of the allowlist."""
    return record["verdict"] == "wrong" if record["mode"] == "training" else not proved(record)


def environment_of(record: Mapping[str, Any]) -> Environment:
    """What a certificate of this record is bound to."""
    facts = record["environment"]
    words = {name: str(facts.get(name) or "") for name in ("torch", "cuda", "cudnn")}
    return Environment(arch=arch_name(facts.get("arch") or ""), zoo=record["zoo_version"], **words)


def build_allowlist(records: Iterable[Record]) -> Allowlist:
    """The allowlist of any number of environments' records."""
    grouped: dict[str, list[Record]] = {}
    for record in records:
        if record["engine"] == "cuda":
            grouped.setdefault(name_of(record), []).append(record)
    certificates = [_certificate(group, name) for name, every in grouped.items() for group in certified(every).values()]
    return Allowlist(tuple(sorted(certificates)), tuple(sorted(grouped)))


def _certificate(rows: list[Record], name: str) -> Certificate:
    newest = max(rows, key=lambda row: (row["recorded"], row["id"]))
    environment = environment_of(newest)
    rows = sorted((row for row in rows if environment_of(row) == environment), key=lambda row: str(row["id"]))
    captures = [figures(row, "capture") for row in rows]
    tried = {
        Tried(t["size"], t["batch"], t["dtype"], tuple(tuple(shape) for shape in t["shapes"])) for row in rows for t in row["tried"]
    }
    grades = [Grade.of(row) for row in rows] if newest["mode"] == "training" else []
    return Certificate(
        zoo=newest["zoo"],
        family=newest["family"],
        task=newest["task"],
        mode=newest["mode"],
        measured_on=name,
        environment=environment,
        tried=tuple(sorted(tried)),
        boundary=next((str(c["boundary"]) for c in captures if c.get("boundary")), _seam(newest)),
        derived_reads=any(bool(c.get("derived_reads")) for c in captures),
        unseen=tuple(sorted({str(what) for c in captures for what in c.get("unseen") or ()})),
        kernels=_census_hash([found for row in rows if (found := census(row))]),
        rows=tuple(row["id"] for row in rows),
        grade=weakest(grades) if grades else "",
        proof=tuple(map(str, grades)),
    )


def _seam(record: Mapping[str, Any]) -> str:
    return str(record.get("training", {}).get("seam", ""))


def _census_hash(censuses: list[Any]) -> str:
    return hashlib.sha256(json.dumps(censuses, sort_keys=True).encode()).hexdigest()[:16] if censuses else ""


def render_allowlist(allowlist: Allowlist) -> str:
    """The text of the file: sorted, without times, a line a certificate."""
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "about": ABOUT,
        "environments": list(allowlist.environments),
        "certificates": [c.to_dict() for c in sorted(allowlist.certificates)],
    }
    body = json.loads(json.dumps(body))  # tuples as the reader will see them, for the checksum
    body["checksum"] = checksum(body)
    lines = ",\n".join(f"  {json.dumps(entry, sort_keys=True)}" for entry in body["certificates"])
    fields = {key: json.dumps(value) for key, value in body.items() if key != "certificates"}
    fields["certificates"] = f"[\n{lines}\n ]" if lines else "[]"
    return "{\n" + ",\n".join(f' "{key}": {text}' for key, text in fields.items()) + "\n}\n"


def write_allowlist(allowlist: Allowlist, path: str | Path) -> None:
    """Replaces the file as a whole. Raises RecordError; the old file then stays."""
    write_atomic(Path(path), render_allowlist(allowlist))
