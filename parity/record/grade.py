"""What a training row's evidence says beside its verdict: a class, the conditions that prove it, how many tensors differed.

A condition is the name of a counterfactual. A class is proved by the smallest set of conditions under which graphed and eager agree bit
for bit; the fewer it takes, the stronger the claim. ``exact`` needs none, unless it is the generator that must be aligned first; where
that cannot be done (``own_rng``) there is none, and the row does not enter the allowlist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from parity.judge.outcome import CLASSES
from parity.judge.verdict import SAFE
from parity.rows.training import Training

FIELDS: Final = ("class", "proof", "tensors", "training")

_NAME: Final = re.compile(r"[^\s,](?:[^\n,]*[^\s,])?")  # of a condition
_PROVED: Final = ", proved by "
_GRADE: Final = re.compile(r"(?P<settings>[^\s:]+): (?P<name>\w+)(?:, proved by (?P<conditions>.+))?")


def training_fields(told: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only a training row has, from ``Outcome.training`` as JSON holds it; empty where nothing was judged."""
    return {
        "class": told.get("class", ""),
        "proof": told.get("proof", []),
        "tensors": told.get("tensors", []),
        "training": dict(told),
    }


def check_training(record: Mapping[str, Any]) -> None:
    """Raises ValueError where the fields of a training row are missing, of another type, or contradict each other."""
    if missing := [name for name in FIELDS if name not in record]:
        raise ValueError(f"a row of mode training lacks {', '.join(missing)}")
    told = record["training"]
    if not isinstance(told, dict):
        raise ValueError(f"training is {type(told).__name__} {str(told)[:60]!r}")
    if wrong := [name for name, value in training_fields(told).items() if record[name] != value]:
        raise ValueError(f"its {', '.join(wrong)} contradicts what stands under training")
    name, proof, tensors = record["class"], record["proof"], record["tensors"]
    if not isinstance(proof, list) or not all(isinstance(word, str) and _NAME.fullmatch(word) for word in proof):
        raise ValueError(f"proof must be a list of names without commas, not {proof!r}")
    if tensors and not (isinstance(tensors, list) and [type(n) for n in tensors] == [int, int] and 0 <= tensors[0] <= tensors[1]):
        raise ValueError(f"tensors must be how many differ and how many there are, not {tensors!r}")
    safe = record["verdict"] in SAFE
    if name not in (CLASSES if safe else ("",)):
        raise ValueError(f"{record['verdict']}, but of class {name!r}: {', '.join(CLASSES) if safe else 'only safe rows have one'}")
    if safe and name in CLASSES[1:-1] and not proof:
        raise ValueError(f"of class {name} without a proof: that is unproven, not {record['verdict']}")


def cause_of(record: Mapping[str, Any]) -> str:
    """Why a row is not safe; of a training row that is, why its graphs differ from eager without the proof's conditions."""
    return str(record["cause"] or record.get("training", {}).get("cause", ""))


def class_expected(family: object, arm: str) -> str:
    """What a declaration demands of the class of an arm, as ``class_found`` words it; empty where any will do."""
    declared = family.classes.get(arm) if isinstance(family, Training) else None
    return "/".join(declared) if declared else ""


def class_found(record: Mapping[str, Any]) -> str:
    """Class and cause of a training row: ``one_ulp/grad-layout``, ``exact/``."""
    return f"{record['class']}/{record['training'].get('cause', '')}"


def graded(record: Mapping[str, Any]) -> str:
    """A verdict in a word, with its class where it has one: ``certified (one_ulp)``."""
    return f"{record['verdict']} ({record['class']})" if record.get("class") else str(record["verdict"])


def verdict_text(record: Mapping[str, Any]) -> str:
    """A verdict with why it is not safe, or else with its class: ``wrong (rng)``, ``certified (one_ulp)``."""
    return f"{record['verdict']} ({record['cause']})" if record["cause"] else graded(record)


def proof_text(conditions: Iterable[str]) -> str:
    """Conditions for a person to read."""
    return ", ".join(conditions) or "no condition"


@dataclass(frozen=True, order=True)
class Grade:
    """What a certificate of training says of one of its rows: the row's settings, its class, and the conditions that prove it."""

    settings: str
    name: str
    conditions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.settings}: {self.name}" + (_PROVED + ", ".join(self.conditions) if self.conditions else "")

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Grade:
        return cls(str(record["settings"]), str(record["class"]), tuple(record["proof"]))

    @classmethod
    def parse(cls, text: str) -> Grade:
        """The inverse of ``str``. Raises ValueError for anything else."""
        match = _GRADE.fullmatch(text)
        if match is None:
            raise ValueError(f"not the grade of a row: {text!r} (such as '64px-b2-float32: eager_noise, proved by deterministic')")
        return cls(match["settings"], match["name"], tuple(match["conditions"].split(", ")) if match["conditions"] else ())

    def weaker_than(self, other: Grade) -> tuple[str, ...]:
        """The conditions that this proof needs and the other does not."""
        return tuple(word for word in self.conditions if word not in other.conditions)


def weakest(grades: Sequence[Grade]) -> str:
    """The class of the one that comes last in ``CLASSES``, which begins with the strongest claim."""
    return max((grade.name for grade in grades), key=CLASSES.index)
