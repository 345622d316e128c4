"""One line of evidence: built from an outcome, and checked when it is read back.

The verdict must follow from the checks beside it. A refused row may hold an ``explanation`` too (``learned``), which decides nothing.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from parity.judge.outcome import CAUSES, PROTOCOL, Outcome
from parity.judge.verdict import SAFE, VERDICTS, Verdict, as_expected, verdict_of
from parity.record.fresh import fingerprint, judge_fingerprint
from parity.record.grade import FIELDS, check_training, class_expected, class_found, training_fields
from parity.record.learned import check_learned
from parity.record.tried import tried
from parity.rows.case import CASE, case_name
from parity.rows.discovery import is_case
from parity.rows.family import Expect, Family
from parity.rows.row import Row
from parity.rows.training import Training
from parity.runtime.allowlist import arch_name

SCHEMA: Final = 1
ENGINES: Final = ("cuda", "emulated")
CONTROLS: Final = "controls"  # the zoo of our own small models: judged with everything, allowlisted never

HEALABLE: Final = frozenset({"wrong", "uncapturable", "not_graphed", "unproven"})

Record = dict[str, Any]

_KINDS: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (int, "schema captures replays peak_memory seed protocol"),
    (
        str,
        "id zoo family task mode arm engine settings verdict expected cause where detail check status message "
        "command fingerprint judge zoo_version recorded expected_cause expected_reason expected_check",
    ),
    (list, "checks probes leaves dead_leaves notes tried"),
    ((int, float), "seconds"),
    (dict, "seconds_phases environment healed"),
)
_TYPES: Final = {name: kind for kind, names in _KINDS for name in names.split()}
_OF_CHECK: Final = {"name": str, "status": str, "detail": str, "cause": str, "where": str, "figures": Mapping}
_FACTS: Final = ("gpu", "arch", "driver", "torch", "cuda", "cudnn")
_OF_OUTCOME: Final = (
    "status",
    "message",
    "checks",
    "probes",
    "leaves",
    "dead_leaves",
    "captures",
    "replays",
    "peak_memory",
    "seed",
    "notes",
    "environment",
)


def json_ready(value: Any, where: str) -> Any:
    """Plain data as JSON gives it back: tuples become lists, NaN and infinities become text.

    Raises TypeError for anything else.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): json_ready(item, where) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(json_ready(item, where) for item in value)
    if isinstance(value, Sequence):
        return [json_ready(item, where) for item in value]
    raise TypeError(f"{where}: a record holds plain data, not {type(value).__name__} {value!r}")


def rerun(row: Row, engine: str, sources: Sequence[str] = ()) -> str:
    """The command that judges this row alone. ``sources``: where families were looked for; the usual places go without saying."""
    case = [s for s in sources if is_case(s) and case_name(Path(s)) == row.family] if row.zoo == CASE else []
    words = ["parity", "certify", *case]
    if not case:
        words += ["--zoo", row.zoo, "--family", row.family, "--task", row.task, "--mode", row.mode]
    words += ["--arm", row.arm]
    words += ["--dtype", row.settings.dtype] if row.mode == "training" else []
    words += ["--size", str(row.settings.size)] if row.settings.size else []
    words += ["--boundary", row.settings.boundary] if row.settings.boundary else []
    usual = ("entry-points", "entry-points:controls", str(Path("families").resolve()))
    words += [w for s in sources if not is_case(s) and s not in usual for w in ("--families", s)]
    return shlex.join([*words, "--engine", engine])


def record_of(
    outcome: Outcome,
    row: Row,
    family: Family | Training,
    engine: str,
    zoo_version: str,
    command: str,
    *,
    environment: Mapping[str, Any] | None = None,
    recorded: str | None = None,
) -> Record:
    """The evidence of one row; of training also what ``grade.FIELDS`` names. Raises ValueError and TypeError for what is none.

    ``command`` reruns it. ``environment``: stands in where a child died before it could report its own. ``recorded``:
    UTC time, default now.
    """
    if outcome.row != row.id:
        raise ValueError(f"an outcome of {outcome.row} cannot be the evidence of {row.id}")
    verdict = verdict_of(outcome, engine)
    expect = family.expectation(row, engine, zoo_version)
    if family.unavailable:  # it is never asked for, so whatever else is declared of it cannot be seen
        expect = Expect("unavailable", f"declared unavailable: {family.unavailable}")
    data = json_ready(outcome.to_dict(), row.id)
    return {
        "schema": SCHEMA,
        "id": row.id,
        "zoo": row.zoo,
        "family": row.family,
        "task": row.task,
        "mode": row.mode,
        "settings": str(row.settings),
        "arm": row.arm,
        "engine": engine,
        "verdict": verdict.verdict,
        "expected": expect.verdict if expect else _safe(engine),
        "expected_cause": expect.cause if expect else "",
        "expected_reason": expect.reason if expect else "",
        "expected_check": expect.check if expect else "",
        "cause": verdict.cause,
        "where": verdict.where,
        "detail": verdict.detail,
        "check": verdict.check,
        "healed": {},
        **{name: data[name] for name in _OF_OUTCOME},
        "environment": data["environment"] or json_ready(environment or {}, row.id),
        "tried": tried(outcome, row, family) if verdict.safe else [],
        "seconds": round(outcome.seconds.get("total", sum(outcome.seconds.values())), 6),
        "seconds_phases": data["seconds"],
        "command": command,
        "protocol": PROTOCOL,
        "judge": judge_fingerprint(row.mode, engine),
        "fingerprint": fingerprint(family),
        "zoo_version": zoo_version,
        "recorded": recorded or datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        **(training_fields(data["training"]) if row.mode == "training" else {}),
        **({"expected_class": wanted} if (wanted := class_expected(family, row.arm)) else {}),
    }


def _safe(engine: str) -> str:
    return "certified" if engine == "cuda" else "screened"


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """The outcome that a record was made from. Raises ValueError where it is none."""
    names = (*_OF_OUTCOME, "training") if record.get("training") else _OF_OUTCOME
    return Outcome.from_dict({"row": record["id"], "seconds": record["seconds_phases"], **{name: record[name] for name in names}})


def validate(record: Any) -> None:
    """Raises ValueError saying what is wrong with a record: foreign, of another schema, inconsistent, or with an edited
    verdict.
    """
    if not isinstance(record, dict) or "id" not in record or "schema" not in record:
        raise ValueError("this is JSON, but not evidence of parity (no id, no schema): take the line out, or name another file")
    if record["schema"] != SCHEMA:
        raise ValueError(
            f"row {record['id']}: evidence of schema {record['schema']!r}, this version reads {SCHEMA}: move the file "
            "away and certify again, or read it with the version that wrote it"
        )
    try:
        _validate(record)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"row {record['id']}: {error}: take the line out and certify the row again") from None


def _validate(record: Record) -> None:
    if missing := sorted(set(_TYPES) - set(record)):
        raise ValueError(f"lacks {', '.join(missing)}")
    for name, kind in _TYPES.items():
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise ValueError(f"{name} is {type(record[name]).__name__} {str(record[name])[:60]!r}")
    row = Row.parse(record["id"])
    parts = {n: getattr(row, n) for n in ("zoo", "family", "task", "mode", "arm")} | {"settings": str(row.settings)}
    if wrong := sorted(n for n, value in parts.items() if record[n] != value):
        raise ValueError(f"its {', '.join(wrong)} contradicts its id")
    for name, known in (("engine", ENGINES), ("verdict", VERDICTS), ("expected", VERDICTS), ("cause", (*CAUSES, ""))):
        if record[name] not in known:
            raise ValueError(f"{name} {record[name]!r} is none of ours")
    if row.mode == "training":
        check_training(record)
    elif found := [name for name in FIELDS if record.get(name)]:
        raise ValueError(f"a row of mode inference has no {', '.join(found)}")
    check_learned(record)
    outcome = outcome_of(record)
    for check in outcome.checks:
        if wrong := [name for name, kind in _OF_CHECK.items() if not isinstance(getattr(check, name), kind)]:
            raise ValueError(f"a check's {wrong[0]} is {str(getattr(check, wrong[0]))[:60]!r}")
    facts, told = record["environment"], record.get("training", {})
    texts = {name: record[name] for name in ("leaves", "dead_leaves", "notes")} | {"ops": told.get("ops", [])}
    texts["environment"] = [facts[name] for name in _FACTS if facts.get(name) is not None]
    if wrong := [name for name, words in texts.items() if not isinstance(words, list) or not all(isinstance(w, str) for w in words)]:
        raise ValueError(f"{wrong[0]} holds what is no text: {str(texts[wrong[0]])[:60]}")
    is_expected(record)  # what is declared must be readable, too
    if odd := sorted({c.status for c in outcome.checks} - {"passed", "failed", "skipped"}):
        raise ValueError(f"a check has the status {odd[0]!r}")
    stored, derived = verdict(record), verdict_of(outcome, record["engine"])
    if stored != derived:
        told = [f"{n} {getattr(stored, n)!r} where the checks give {getattr(derived, n)!r}" for n in _differing(stored, derived)]
        reason = (
            "edited by hand"
            if record["judge"] == judge_fingerprint(row.mode, record["engine"])
            else "edited by hand, or of another judge"
        )
        raise ValueError(f"{reason}: it says {', '.join(told)}")


def _differing(one: Verdict, other: Verdict) -> list[str]:
    return [n for n in ("verdict", "cause", "where", "detail", "check") if getattr(one, n) != getattr(other, n)]


def verdict(record: Mapping[str, Any]) -> Verdict:
    """The verdict as it stands in a record."""
    return Verdict(record["verdict"], record["cause"], record["where"], record["detail"], record["check"])


def is_expected(record: Mapping[str, Any]) -> bool:
    """Whether a record's verdict is the one its family declared for it, and its class, where one was declared."""
    if record.get("expected_class", "") not in ("", class_found(record) if "class" in record else ""):
        return False
    if record["expected"] == "unavailable":  # nothing was judged, so there is no cause that could be known
        return bool(record["verdict"] == "unavailable")
    if record["expected"] in SAFE:
        return as_expected(verdict(record), None)
    declared = {name: record[f"expected_{name}"] for name in ("reason", "cause", "check")}
    return as_expected(verdict(record), Expect(record["expected"], **declared))


def subject(record: Mapping[str, Any]) -> str:
    """The id without its arm."""
    return str(record["id"]).rpartition("/")[0]


def figures(record: Mapping[str, Any], check: str) -> Mapping[str, Any]:
    """The figures of one check, empty where it did not run."""
    for entry in record["checks"]:
        if entry["name"] == check:
            found: Mapping[str, Any] = entry.get("figures") or {}
            return found
    return {}


def census(record: Mapping[str, Any]) -> dict[str, int]:
    """Kernel name to its count in the graph, as ``replay`` or ``capture`` saw it; empty where no census was taken."""
    found = figures(record, "replay").get("kernels") or figures(record, "capture").get("kernels") or {}
    return {str(name): int(count) for name, count in found.items()}


def mark_healed(records: Iterable[Record]) -> list[Record]:
    """Records in order, each safe ``graphed`` one listing what it makes right: arm to cause of its unsafe siblings,
    same engine.
    """
    listed = list(records)
    unsafe: dict[tuple[str, str], dict[str, str]] = {}
    for record in listed:
        if record["arm"] in ("bare", "native") and record["verdict"] in HEALABLE:
            unsafe.setdefault((subject(record), record["engine"]), {})[record["arm"]] = record["cause"]
    return [
        record | {"healed": unsafe.get((subject(record), record["engine"]), {})}
        if record["arm"] == "graphed" and record["verdict"] in SAFE
        else record | {"healed": {}}
        for record in listed
    ]


def environment_name(environment: Mapping[str, Any], engine: str) -> str:
    """The stem of an environment's file: ``nvidia-h200-sm90-torch2.11.0-cu130``, ``emulated-cpu-torch2.14.1``."""
    version = str(environment.get("torch") or "unknown").partition("+")[0]
    if engine != "cuda":
        return _slug(f"{engine}-cpu-torch{version}")
    gpu = str(environment.get("gpu") or "unknown-gpu")
    arch = arch_name(environment.get("arch") or "")
    cuda = "cu" + str(environment.get("cuda") or "unknown").replace(".", "")
    return _slug("-".join(part for part in (gpu, arch, f"torch{version}", cuda) if part))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
