"""What changed between two evidence files, after an upgrade say: verdicts, causes, kernels, figures.

Seconds are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from parity.record.grade import cause_of, proof_text, verdict_text
from parity.record.line import Record, census

KINDS: Final = ("environment", "removed", "added", "verdict", "cause", "class", "proof", "where", "kernels", "figures")
LOOK: Final = frozenset({"removed", "added", "verdict", "cause", "class", "proof"})  # somebody must look: exit code 1

_COUNTS: Final = ("captures", "replays", "peak_memory", "leaves", "dead_leaves")


@dataclass(frozen=True)
class Change:
    """One difference of one row; ``row`` is empty for what concerns the whole file."""

    row: str
    kind: str
    message: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diff(old: Iterable[Record], new: Iterable[Record]) -> list[Change]:
    """Every difference, what matters most first, then by row."""
    before = {record["id"]: record for record in old}
    after = {record["id"]: record for record in new}
    changes = _environments(before.values(), after.values())
    for key in sorted(before.keys() | after.keys()):
        if key not in after:
            changes.append(Change(key, "removed", f"was {verdict_text(before[key])}, has no evidence now"))
        elif key not in before:
            changes.append(Change(key, "added", f"is {verdict_text(after[key])}, had no evidence"))
        else:
            changes += (Change(key, kind, told) for kind, told in _row(before[key], after[key]))
    return sorted(changes, key=lambda change: (KINDS.index(change.kind), change.row))


def _row(old: Record, new: Record) -> Iterable[tuple[str, str]]:
    if old["verdict"] != new["verdict"]:
        yield "verdict", f"{verdict_text(old)} -> {verdict_text(new)}"
    elif cause_of(old) != cause_of(new):
        yield "cause", f"{cause_of(old) or 'none'} -> {cause_of(new) or 'none'}"
    if old.get("class") != new.get("class"):
        yield "class", f"{old.get('class') or 'none'} -> {new.get('class') or 'none'}"
    if told := _proof(old.get("proof", []), new.get("proof", [])):
        yield "proof", told
    if old["where"] != new["where"]:
        yield "where", f"{old['where'] or 'nowhere'} -> {new['where'] or 'nowhere'}"
    if told := _kernels(Counter(census(old)), Counter(census(new))):
        yield "kernels", told
    if told := ", ".join(_figures(old, new)):
        yield "figures", told


def _proof(old: Sequence[str], new: Sequence[str]) -> str:
    more, fewer = [word for word in new if word not in old], [word for word in old if word not in new]
    if not more and not fewer:
        return ""
    why = [f"needs {', '.join(more)} besides"] * bool(more) + [f"no longer needs {', '.join(fewer)}"] * bool(fewer)
    return f"{proof_text(old)} -> {proof_text(new)}: {' and '.join(why)}"


def _kernels(old: Counter[str], new: Counter[str]) -> str:
    if not old or not new:
        return "" if not old and not new else f"a census of {old.total()} kernels -> of {new.total()}"
    changed = [f"{name} {old[name]} -> {new[name]}" for name in sorted(old.keys() | new.keys()) if old[name] != new[name]]
    return f"{old.total()} -> {new.total()}: {', '.join(changed)}" if changed else ""


def _figures(old: Record, new: Record) -> Iterable[str]:
    for name in _COUNTS:
        if old[name] != new[name]:
            yield f"{name} {_short(old[name])} -> {_short(new[name])}"
    if (was := old.get("tensors")) != (now := new.get("tensors")):
        yield f"tensors {_differing(was)} -> {_differing(now)}"
    checks = [{entry["name"]: entry for entry in record["checks"]} for record in (old, new)]
    for name in dict.fromkeys([*checks[0], *checks[1]]):
        one, other = (c.get(name) for c in checks)
        if one is None or other is None:
            yield f"{name} {one['status'] if one else 'absent'} -> {other['status'] if other else 'absent'}"
            continue
        if one["status"] != other["status"]:
            yield f"{name} {one['status']} -> {other['status']}"
        values = [dict(entry.get("figures") or {}) for entry in (one, other)]
        for key in sorted(values[0].keys() | values[1].keys()):
            if key != "kernels" and values[0].get(key) != values[1].get(key):
                yield f"{name}.{key} {_short(values[0].get(key))} -> {_short(values[1].get(key))}"


def _differing(tensors: Sequence[int] | None) -> str:
    return "{} of {} differing".format(*tensors) if tensors else "none"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _environments(old: Iterable[Record], new: Iterable[Record]) -> list[Change]:
    facts = [_facts(old), _facts(new)]
    told = [
        f"{name} {' and '.join(facts[0].get(name, ['nothing']))} -> {' and '.join(facts[1].get(name, ['nothing']))}"
        for name in sorted(facts[0].keys() | facts[1].keys())
        if facts[0].get(name) != facts[1].get(name)
    ]
    return [Change("", "environment", line) for line in told]


def _facts(records: Iterable[Record]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for record in records:
        found.setdefault("engine", set()).add(record["engine"])
        found.setdefault(f"{record['zoo']} (zoo)", set()).add(record["zoo_version"])
        for name in ("gpu", "arch", "driver", "torch", "cuda", "cudnn", "python"):
            if value := record["environment"].get(name):
                found.setdefault(name, set()).add(str(value))
    return {name: sorted(values) for name, values in found.items()}


def render_diff(changes: Iterable[Change]) -> str:
    """Plain text, a heading a kind; a sentence where nothing changed."""
    lines: list[str] = []
    kind = ""
    for change in changes:
        if change.kind != kind:
            kind = change.kind
            lines.append(f"{kind}:")
        lines.append(f"  {change.row}: {change.message}" if change.row else f"  {change.message}")
    return "\n".join(lines) or "nothing changed"


def exit_code(changes: Iterable[Change]) -> int:
    """1 if a row came, went, or changed its verdict, cause, class or proof; else 0."""
    return int(any(change.kind in LOOK for change in changes))
