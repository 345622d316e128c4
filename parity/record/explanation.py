"""The answer of ``parity explain``: from outcomes to plain data, and from that to a text for a person. Pure: no torch, no device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from parity.judge.outcome import Outcome
from parity.judge.verdict import SAFE, as_expected, verdict_of
from parity.record.advice import advise, spoken
from parity.record.fresh import NOT_JUDGED
from parity.record.learned import FIELD, learned
from parity.record.line import is_expected, outcome_of
from parity.rows.family import Expect
from parity.rows.row import Row

_SAFE: Final = "Nothing was found that a graph cannot record."
_SAFE_BUT: Final = "The verdict is about what this engine sees. What is listed above is known of the operation: a device refuses it."
_PLACE: Final = re.compile(r"(?P<file>\S+|.+?\.py):(?P<line>\d+)(?: (?P<code>.*))?", re.DOTALL)
_UNTRIED: Final = "not tried"
"""How the proof of a cut begins that nothing was captured for."""
Explanation = dict[str, Any]


def explanation(
    target: str, engine: str, judged: Sequence[Outcome], studied: Outcome, expect: Mapping[str, Expect | None]
) -> Explanation:
    """``judged``: the arms, the one that is asked about first; ``studied``: what the arm ``eager`` was studied for; ``expect``: arm
    to what is declared. Keys: target, id, engine, verdict, expected (bool), cause, check, detail, op, where, file, line, code,
    module, advice, stale, class, proved, proof, tried (conditions, and tensors that differ under them), reasons, divergence, finding,
    seam, unseen, arms, stopped."""
    found = verdict_of(judged[0], engine)
    expected = as_expected(found, expect.get(Row.parse(judged[0].row).arm))
    return _told(target, engine, judged, learned(studied, engine), expected)


def recorded(record: Mapping[str, Any], beside: Sequence[Mapping[str, Any]] = ()) -> Explanation:
    """The same of a record that holds an explanation. ``beside``: records of the subject's other arms, from the same engine."""
    others = [r for r in beside if r["id"] != record["id"]]
    judged = [outcome_of(r) for r in (record, *others)]
    return _told(record["id"], record["engine"], judged, record[FIELD], is_expected(record))


def _told(target: str, engine: str, judged: Sequence[Outcome], study: Mapping[str, Any], expected: bool) -> Explanation:
    outcome = judged[0]
    found = verdict_of(outcome, engine)
    divergence, finding = study["divergence"], study["finding"]
    reason = _reason(found.cause, found.where, study["reasons"])
    where = found.where or reason.get("where", "") or finding.get("where", "") or divergence.get("where", "")
    file, line, code = place(where)
    op = reason.get("what", "") or divergence.get("operation", "")
    return {
        "target": target,
        "id": outcome.row,
        "engine": engine,
        "verdict": found.verdict,
        "expected": expected,
        "cause": found.cause,
        "check": found.check,
        "detail": found.detail,
        "op": op,
        "where": where,
        "file": file,
        "line": line,
        "code": code,
        "module": reason.get("module", divergence.get("module", "")),
        "advice": "" if found.safe or found.verdict in NOT_JUDGED else advise(found.cause, op or found.detail),
        "stale": _stale(outcome, found.check),
        "class": outcome.training.get("class", ""),
        "proved": outcome.training.get("cause", ""),
        "proof": list(outcome.training.get("proof", ())),
        "tried": [] if found.safe else [dict(trial) for trial in outcome.training.get("tried", ())],
        **{name: study[name] for name in ("reasons", "divergence", "finding", "seam", "stopped", "unseen")},
        "arms": {Row.parse(o.row).arm: {"verdict": v.verdict, "cause": v.cause} for o in judged for v in [verdict_of(o, engine)]},
    }


def _stale(outcome: Outcome, check: str) -> list[str]:
    """What the replay read after its owner had dropped it, by attribute."""
    return next((list(map(str, c.figures.get("stale", ()))) for c in outcome.checks if c.name == check), [])


def place(where: str) -> tuple[str, int, str]:
    """File, line and code of ``file:line code``; empty parts where there are none."""
    found = _PLACE.fullmatch(where)
    return (found["file"], int(found["line"]), found["code"] or "") if found else ("", 0, where)


def _reason(cause: str, where: str, reasons: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    alike = [r for r in reasons if r["cause"] == cause]
    return next((r for r in alike if r["where"] == where), alike[0] if alike and not where else {})


# ---------------------------------------------------------------- text
def render(told: Mapping[str, Any]) -> str:
    """The answer, for a person."""
    safe = told["verdict"] in SAFE
    unjudged = told["verdict"] in NOT_JUDGED
    cause = f" ({told['cause']})" if told["cause"] and not safe and not unjudged else ""
    name = told["target"] if told["id"].startswith("case/") else told["id"]
    lines: list[str | None] = [f"{name}: {told['verdict']}{cause}, on the {told['engine']} engine"]
    if told["check"]:
        lines.append(_field("check", f"{told['check']}: {told['detail']}"))
    if unjudged:
        return "\n".join([*filter(None, lines), told["detail"] or told["stopped"]])
    if not safe:
        lines += [_field("operation", spoken(told["op"])), *_source(told), _field("submodule", told["module"] or _own(told))]
        lines.append(_field("do", told["advice"]))
    lines += [_field("dropped", text) for text in told["stale"]]
    lines.append(_field("tried", _tried(told["tried"])))
    if told["class"]:
        proved = f" ({told['proved']}), proved by {', '.join(told['proof'])}" if told["proof"] else ""
        lines += [_field("class", told["class"] + proved), _field("do", advise(told["proved"]))]
    lines += _seam(told["seam"])
    lines += _divergence(told)
    lines += _reasons(told)
    others = [f"{arm}: {v['verdict']}" + (f" ({v['cause']})" if v["cause"] else "") for arm, v in list(told["arms"].items())[1:]]
    lines += [_field("beside it", ", ".join(others)), _field("incomplete", told["stopped"])]
    if told["unseen"]:
        lines += ["", "cannot be seen here:", *(f"  - {text}" for text in told["unseen"])]
    if safe:
        lines += ["", _SAFE_BUT if told["reasons"] else _SAFE]
    return "\n".join(line for line in lines if line is not None)


def _field(name: str, text: str) -> str | None:
    return f"  {name:<11}{text}" if text else None


def _own(told: Mapping[str, Any]) -> str:
    return "the model itself" if told["where"] or told["op"] else ""


def _source(told: Mapping[str, Any]) -> list[str | None]:
    if not told["file"]:
        return [_field("line", told["where"])]
    return [_field("line", f"{told['file']}:{told['line']}"), _field("", told["code"])]


def _tried(trials: Sequence[Mapping[str, Any]]) -> str:
    """Under which conditions a training step differs all the same, and in how many tensors."""
    told = [f"{' + '.join(t['conditions']) or 'no condition'} ({t['differing'] if t['differing'] >= 0 else 'some'})" for t in trials]
    return f"tensors differ under {', '.join(told)}" if told else ""


def _seam(seam: Mapping[str, Any]) -> list[str | None]:
    if not seam:
        return []
    dropped = [_field("not", text) for text in seam["dropped"]]
    if not seam["pieces"]:
        return [_field("cut", seam["proof"]), *dropped]
    share = f"paths from {seam['model']}; {seam['operations']:.0%} of the operations, {seam['seconds']:.0%} of the time"
    tried = "" if seam["proof"].startswith(_UNTRIED) else "captured and replayed: "
    return [_field("cut", seam["code"]), _field("", f"{share}; {tried}{seam['proof']}"), *dropped]


def _divergence(told: Mapping[str, Any]) -> list[str | None]:
    divergence = told["divergence"]
    if not divergence:
        return []
    when = "after the weights changed" if divergence["probe"] == "weights" else f"probe {divergence['probe']}"
    text = f"call {divergence['call']} ({when}), in {divergence['piece'] or 'the model itself'}"
    if divergence["operation"]:
        text += f": {divergence['operation']} at {divergence['where']}"
    elif divergence.get("noisy"):
        text += ": eager itself does not repeat there"
    else:
        text += f", which returns what an earlier call made: {divergence['where']}"
    return [_field("first off", text), _field("experiment", told["finding"].get("detail", ""))]


def _reasons(told: Mapping[str, Any]) -> list[str | None]:
    reasons = told["reasons"]
    if len(reasons) < 2 and told["verdict"] not in SAFE:
        return []
    lines: list[str | None] = ["", f"all that one forward does and a graph cannot record ({len(reasons)}):"] if reasons else []
    for reason in reasons:
        times = f", {reason['count']} times" if reason["count"] > 1 else ""
        lines.append(f"  {reason['cause']} in {reason['module'] or 'the model itself'}{times}: {spoken(reason['what'])}")
        lines += [f"      {reason['where']}", f"      -> {reason['advice']}"]
    return lines
