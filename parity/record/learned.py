"""What a study of a refused row found, as its line of evidence keeps it: plain data, made from an outcome, checked when read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from parity.judge.outcome import Outcome
from parity.record.advice import advise

FIELD: Final = "explanation"
STUDY: Final = "study"
"""The check whose figures hold what was learned about the row."""
EXPLAINED: Final = frozenset({"wrong", "uncapturable"})
"""The verdicts that a study can say more about."""
UNSEEN: Final = (
    "kernels, and the streams that libraries launch them on, beyond what is known by name (deform_conv2d)",
    "noise of kernels: atomics, cuDNN's and cuBLAS's choice of algorithm, their workspaces on a cold stream",
    "memory: reuse within a graph's pool, addresses that another shape frees while a kernel of a library still reads them",
)
"""What the emulated engine cannot see of any model."""

_NUMBER: Final = (int, float)
_KEYS: Final[Mapping[str, type]] = {
    "reasons": list, "divergence": dict, "finding": dict, "seam": dict, "stopped": str, "unseen": list,
}  # fmt: skip
_REASON: Final = {"cause": str, "what": str, "where": str, "module": str, "advice": str, "count": int}
_DIVERGENCE: Final = {"call": int, "probe": str, "piece": str, "module": str, "operation": str, "where": str}
_SEAM: Final = {
    "model": str, "code": str, "pieces": list, "proof": str, "dropped": list, "operations": _NUMBER, "seconds": _NUMBER,
}  # fmt: skip


def figures(studied: Outcome) -> Mapping[str, Any]:
    return next((check.figures for check in studied.checks if check.name == STUDY), {})


def learned(studied: Outcome, engine: str) -> dict[str, Any]:
    """Of the arm ``eager``, as it was studied: ``reasons`` (each with its advice), ``divergence``, ``finding``, ``seam``, ``stopped``
    (why the look is incomplete, empty where it is whole; a study that failed says so here), ``unseen``."""
    study = figures(studied)
    return {
        "reasons": [{**r, "advice": advise(r["cause"], r["what"])} for r in study.get("reasons", [])],
        "divergence": study.get("divergence", {}),
        "finding": study.get("finding", {}),
        "seam": study.get("seam", {}),
        "stopped": study.get("stopped", "") or ("" if study else studied.message or "the study says nothing"),
        "unseen": [*(UNSEEN if engine == "emulated" else ()), *(f"the inside of {name}" for name in study.get("unseen", []))],
    }


def check_learned(record: Mapping[str, Any]) -> None:
    """Raises ValueError where a record's explanation is none, or stands where nothing was refused. A record without one is valid."""
    if FIELD not in record:
        return
    told = record[FIELD]
    if record["verdict"] not in EXPLAINED:
        raise ValueError(f"{record['verdict']}, but with an {FIELD}: only {' and '.join(sorted(EXPLAINED))} rows have one")
    _check(FIELD, told, {**_KEYS, "study": str})
    for reason in told["reasons"]:
        _check("a reason", reason, _REASON)
    for name, keys in (("divergence", _DIVERGENCE), ("seam", _SEAM)):
        if told[name]:
            _check(name, told[name], keys)
    for piece in told["seam"].get("pieces", ()):
        _check("a piece of the seam", piece, {"path": str})


def _check(name: str, value: Any, keys: Mapping[str, Any]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {type(value).__name__} {str(value)[:60]!r}")
    if odd := [key for key, kind in keys.items() if not isinstance(value.get(key), kind) or isinstance(value[key], bool)]:
        raise ValueError(f"{name} says nothing readable of {', '.join(odd)}")
