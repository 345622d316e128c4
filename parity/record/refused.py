"""The refused rows of a support matrix: what our runtime does not make safe either, why, what to do, and where to cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from parity.record.advice import advise
from parity.record.explanation import Explanation, recorded, render
from parity.record.learned import FIELD
from parity.record.line import Record, is_expected, subject
from parity.record.markdown import code, table

REFUSED: Final = frozenset({"wrong", "uncapturable", "not_graphed", "unproven", "unstable"})
NAMED: Final = 3  # pieces of a cut that the table names; the folded text names all
Key = tuple[str, str, str, str]


def refused_parts(records: Sequence[Record]) -> Iterable[str]:
    """A table, arms that agree on verdict, cause and line told together, and what studies told in full, folded; nothing for nothing."""
    groups = _groups(records)
    if not groups:
        return
    yield "**Refused**: do not replay these"
    told = {key: _told(group, records) for key, group in groups.items()}
    rows = [_row(key, group, told[key]) for key, group in sorted(groups.items())]
    cut = any(row["cut"] for row in rows)
    yield table(rows if cut else [{name: text for name, text in row.items() if name != "cut"} for row in rows])
    texts = {key: render(found) for key, found in sorted(told.items()) if found}
    if texts:
        yield f"<details><summary>Why they are refused, in full ({len(texts)})</summary>"
        for text in texts.values():
            yield _block(text)
        yield "</details>"


def _groups(records: Sequence[Record]) -> dict[Key, list[Record]]:
    healed = {subject(record) for record in records if record["healed"]}
    groups: dict[Key, list[Record]] = {}
    for record in records:
        if record["verdict"] in REFUSED and subject(record) not in healed:
            key = (subject(record), record["verdict"], record["cause"], record["where"])
            groups.setdefault(key, []).append(record)
    return groups


def _told(group: Sequence[Record], records: Sequence[Record]) -> Explanation:
    """The explanation that one of the arms holds; empty where none does."""
    for record in group:
        if FIELD in record:
            return recorded(record, [r for r in records if subject(r) == subject(record) and r["engine"] == record["engine"]])
    return {}


def _row(key: Key, group: Sequence[Record], told: Mapping[str, Any]) -> dict[str, str]:
    name, verdict, cause, where = key
    return {
        "rows": code(name),
        "arms": ", ".join(record["arm"] for record in group),
        "verdict": verdict,
        "cause": cause,
        "where": code(where or (told["where"] if told else "")),
        "declared": group[0]["expected_reason"] if all(map(is_expected, group)) else "not declared",
        "what to do": (told["advice"] if told else "") or advise(cause, group[0]["detail"]),
        "cut": _cut(told["seam"]) if told else "",
    }


def _cut(seam: Mapping[str, Any]) -> str:
    """The first pieces of a proposal and the share of all; what came of it where there are none."""
    if not seam:
        return ""
    if not seam["pieces"]:
        return str(seam["proof"])
    pieces = ", ".join(code(str(piece["path"])) for piece in seam["pieces"][:NAMED])
    more = f" and {len(seam['pieces']) - NAMED} more" if len(seam["pieces"]) > NAMED else ""
    return f"{pieces}{more}: {seam['operations']:.0%} of the operations, {seam['proof']}"


def _block(text: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
