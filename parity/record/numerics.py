"""The training tables of the matrix: which class each row is of, what proves it, and what the zoo's own capture comes to beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from parity.judge.outcome import CLASSES
from parity.judge.verdict import SAFE
from parity.record.bench import Measurement
from parity.record.grade import cause_of, graded, proof_text
from parity.record.line import Record, is_expected
from parity.record.markdown import code, table
from parity.rows.row import Settings
from parity.rows.training import DTYPES

INTRODUCTION: Final = (
    "Every loss, output, buffer and gradient of a training step is compared with eager, bit for bit: `exact` has eager's bits as they "
    "are, `one_ulp` and `float_rounding` are off by the last bit or by more because a sum is rounded otherwise, `eager_noise` differs "
    "where eager differs from itself, and `own_rng` draws other random numbers. Every class but the last is proved, not presumed: "
    "under the conditions that stand beside it, applied to both arms, every bit agreed."
)
SHORT: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}  # the words for what autocast casts to
SHOWN: Final = 3  # ops that a cell names
NOISE: Final = "nondeterministic-kernel"
ARMS: Final = ("graphed", "native", "bare")


def short(dtype: str) -> str:
    """A dtype of the settings in a word for a table."""
    return SHORT.get(dtype, dtype)


def _dtype(record: Record) -> str:
    return Settings.parse(record["settings"]).dtype


def dtype_order(dtype: str) -> tuple[int, str]:
    """Sorts dtypes as training names them, others behind."""
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES), dtype)


def classes_table(records: Sequence[Record]) -> str:
    """Class and proof by families, of the safe ``graphed`` rows: the numerics in one look. Empty where there is none."""
    found: dict[tuple[str, tuple[str, ...]], dict[str, list[str]]] = {}
    for record in records:
        if record["arm"] == "graphed" and record["verdict"] in SAFE:
            families = found.setdefault((record["class"], tuple(record["proof"])), {})
            families.setdefault(record["family"], []).append(_dtype(record))
    rows = []
    for (name, proof), families in sorted(found.items(), key=lambda item: (CLASSES.index(item[0][0]), len(item[0][1]), item[0][1])):
        told = ", ".join(f"{family} ({short_dtypes(dtypes)})" for family, dtypes in sorted(families.items()))
        rows.append({"class": name, "proved by": proof_text(proof), "families": told})
    return table(rows)


def short_dtypes(names: Iterable[str]) -> str:
    """Each dtype once, in the order of training, in words for a table."""
    return ", ".join(short(name) for name in sorted(set(names), key=dtype_order))


def training_table(subjects: Sequence[Mapping[str, Record]], speed: Mapping[str, Measurement]) -> str:
    """A line a subject, in their order, its arms beside each other. A subject: arm to record; ``speed``: row id to what was measured.
    Empty where there is none.
    """
    arms = [arm for arm in ARMS if any(arm in subject for subject in subjects)]
    measured = any(record["id"] in speed for subject in subjects for record in subject.values())
    return table([_line(subject, arms) | (_speed(subject, arms, speed) if measured else {}) for subject in subjects])


def _speed(subject: Mapping[str, Record], arms: Iterable[str], speed: Mapping[str, Measurement]) -> dict[str, str]:
    found = {arm: speed.get(subject[arm]["id"]) if arm in subject else None for arm in arms}
    return {f"{arm}: speed-up": f"{m.speedup:.2f}x" if m else "" for arm, m in found.items()}


def _line(subject: Mapping[str, Record], arms: Iterable[str]) -> dict[str, str]:
    first = next(iter(subject.values()))
    line = {"family": first["family"], "task": first["task"], "setting": short(_dtype(first))}
    for arm in arms:
        record = subject.get(arm)
        line[arm] = verdict_cell(record)
        line[f"{arm}: gradients differing"] = "/".join(map(str, record["tensors"])) if record else ""
        line[f"{arm}: cause"] = _cause(record) if record else ""
        line[f"{arm}: proved by"] = _proof(record) if record else ""
    graphed = subject.get("graphed", first)
    line["peak memory"] = _memory(graphed["peak_memory"])
    line["captured"] = str(graphed["training"].get("seam", ""))
    return line


def _cause(record: Record) -> str:
    """The cause; of noise, the ops that make it, each with the first place where it does."""
    places: dict[str, list[str]] = {}
    for op in record["training"].get("ops", []):
        head, _, where = op.partition(" at ")
        places.setdefault(head.partition(" ")[0], []).append(f"{head} at {where.partition(' ')[0]}" if where else head)
    if not places or (cause := cause_of(record)) != NOISE:
        return cause_of(record)
    told = [of[0] + (f" and {_more(len(of) - 1, 'place')}" if len(of) > 1 else "") for of in places.values()]
    more = [_more(len(told) - SHOWN, "operation")] if len(told) > SHOWN else []
    return f"{cause}: {'; '.join([*told[:SHOWN], *more])}"


def _more(count: int, what: str) -> str:
    return f"{count} more {what}{'s' * (count > 1)}"


def _proof(record: Record) -> str:
    """The conditions; said to be more than are needed where they may be."""
    return ", ".join(record["proof"]) + ("" if record["training"].get("minimal", True) else " (fewer may do)")


def tried_table(records: Sequence[Record]) -> str:
    """Of each row that is unproven, what was tried and what still differed then. Empty where there is none."""
    rows = []
    for record in records:
        if record["verdict"] == "unproven":
            told = [f"{_names(trial['conditions'])}: {_count(trial['differing'])}" for trial in record["training"].get("tried", [])]
            rows.append({"row": code(record["id"]), "conditions: tensors still differing": "; ".join(told) or "nothing"})
    return table(rows)


def _names(conditions: Sequence[str]) -> str:
    return " + ".join(conditions) or "none"


def _count(differing: int) -> str:
    return str(differing) if differing >= 0 else "some"


def verdict_cell(record: Record | None) -> str:
    """A verdict with its class; in bold where it is not the declared one."""
    if record is None:
        return ""
    word = graded(record)
    return word if is_expected(record) or record["verdict"] == "unavailable" else f"**{word}**, declared {record['expected']}"


def _memory(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size else ""
