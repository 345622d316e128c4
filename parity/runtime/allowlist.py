"""The allowlist that the runtime obeys: schema and reader. Standard library only; reading it needs no torch.

One certificate says: this family, at this task and mode, on this environment, at these shapes, replayed every bit of
eager. What a certificate does not cover is not forbidden; it must prove itself against eager at first use (``gap`` says
what is missing).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from parity.runtime.errors import ParityError

SCHEMA: Final = 1
FILE: Final = "SUPPORTS_CUDA_GRAPH.json"
REGENERATE: Final = "regenerate it from the evidence with `parity report`, never by hand"

_MODES: Final = ("inference", "training")
_OPTIONAL: Final = frozenset({"class", "proof", "slower"})
_NOT_OF_TRAINING: Final = {"boundary": "", "derived_reads": False, "unseen": [], "kernels": ""}


class AllowlistError(ParityError, ValueError):
    """An allowlist that is missing, unreadable, of another schema, or at odds with itself.

    The message names the file.
    """


def arch_name(value: str | Sequence[int]) -> str:
    """A GPU architecture as one word, ``sm90``, from ``(9, 0)``, ``9.0``, ``sm_90`` or ``sm90``."""
    text = value if isinstance(value, str) else "".join(str(part) for part in value)
    return "sm" + text.removeprefix("sm").replace("_", "").replace(".", "") if text else ""


@dataclass(frozen=True, order=True)
class Environment:
    """What a certificate is bound to.

    ``arch`` as ``arch_name`` words it, versions as torch reports them, ``zoo`` the zoo's version.
    """

    arch: str
    torch: str
    cuda: str
    cudnn: str
    zoo: str


@dataclass(frozen=True, order=True)
class Tried:
    """One thing that was tried. ``size``: edge in pixels, 0 where there is none.

    ``dtype``: torch's name of it, without ``torch.``.

    ``shapes``: of the input tensors of a forward, in order, batch included.
    """

    size: int
    batch: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, order=True)
class Certificate:
    """A family that may be replayed, and what that was proved for.

    ``measured_on``: name of the environment's evidence file. ``boundary``: what was captured. ``derived_reads``: the
    region reads tensors that were computed from weights outside it. ``unseen``: what tracing could not see.
    ``kernels``: hash of the graph's kernel census, empty where there was none. ``rows``: ids of the evidence.
    ``grade``, ``proof``: of training, in the file ``class`` and ``proof``. ``slower``: what eager was measured to be faster at.
    """

    zoo: str
    family: str
    task: str
    mode: str
    measured_on: str
    environment: Environment
    tried: tuple[Tried, ...]
    boundary: str = ""
    derived_reads: bool = False
    unseen: tuple[str, ...] = ()
    kernels: str = ""
    rows: tuple[str, ...] = ()
    grade: str = ""
    proof: tuple[str, ...] = ()
    slower: tuple[Tried, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.zoo}/{self.family}/{self.task}/{self.mode}"

    def to_dict(self) -> dict[str, Any]:
        every = {"id": self.id, "verdict": "certified", **asdict(self)}
        optional = {"class": every.pop("grade"), "proof": every.pop("proof"), "slower": every.pop("slower")}
        return every | {name: value for name, value in optional.items() if value}


def is_slower(certificate: Certificate, environment: Environment, shapes: Iterable[Sequence[int]], dtype: str) -> bool:
    """Whether eager was measured to be the faster way here. Elsewhere nothing was measured."""
    wanted = tuple(tuple(shape) for shape in shapes)
    return certificate.environment == environment and any(t.shapes == wanted and t.dtype == dtype for t in certificate.slower)


def gap(certificate: Certificate, environment: Environment, shapes: Iterable[Sequence[int]], dtype: str) -> str:
    """Why a certificate does not cover a call, as a sentence; empty where it does.

    ``shapes``: of the input tensors, in order. In training those of the network, which come first in a batch; ``dtype`` is autocast's.
    """
    for name in (f.name for f in fields(Environment)):
        here, there = getattr(environment, name), getattr(certificate.environment, name)
        if here != there:
            label = f"{certificate.zoo}'s version" if name == "zoo" else name
            return f"{certificate.id} was certified with {label} {there or 'unknown'}, this is {here or 'unknown'}"
    wanted = tuple(tuple(shape) for shape in shapes)
    given = len(wanted) if certificate.mode == "training" else None
    if not any(t.shapes[:given] == wanted and t.dtype == dtype for t in certificate.tried):
        told = " ".join(map(_shape, wanted)) or "without tensors"
        return f"{certificate.id} was not tried with inputs {told} in {dtype}"
    return ""


def covers(certificate: Certificate, environment: Environment, shapes: Iterable[Sequence[int]], dtype: str) -> bool:
    """Whether a call may be trusted without validating itself first."""
    return not gap(certificate, environment, shapes, dtype)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


@dataclass(frozen=True)
class Allowlist:
    """All certificates.

    ``environments``: names of those with evidence, also of one where nothing could be certified.
    """

    certificates: tuple[Certificate, ...] = ()
    environments: tuple[str, ...] = ()

    def find(
        self, zoo: str, family: str, task: str, mode: str = "inference", environment: Environment | None = None
    ) -> Certificate | None:
        """The certificate of a family, or None.

        Of several, the one whose environment has most in common with ``environment``.
        """
        wanted = f"{zoo}/{family}/{task}/{mode}"
        found = [c for c in self.certificates if c.id == wanted]
        if environment is None:
            return found[0] if found else None
        names = [f.name for f in fields(Environment)]
        return max(found, key=lambda c: sum(getattr(c.environment, n) == getattr(environment, n) for n in names), default=None)

    @classmethod
    def load(cls, path: str | Path) -> Allowlist:
        """Reads and checks an allowlist. Raises AllowlistError, which names the file, what is wrong and what to do."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        except FileNotFoundError:
            raise AllowlistError(f"{path}: no such allowlist; `parity report` writes it from the evidence") from None
        except OSError as error:
            raise AllowlistError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # also bytes that are not UTF-8
            raise AllowlistError(f"{path}: not an allowlist: {error}; {REGENERATE}") from error
        try:
            return _allowlist(data)
        except (ValueError, TypeError, KeyError) as error:
            text = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise AllowlistError(f"{path}: {text}; {REGENERATE}") from error

    @classmethod
    def packaged(cls) -> Allowlist:
        """The allowlist this installation came with. Raises AllowlistError where there is none."""
        return cls.load(default_path())


def default_path() -> Path:
    """Inside the package where it was installed from a wheel; else ``reports/`` of the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "reports" / FILE
    return installed if installed.exists() else package.parent / "reports" / FILE


def checksum(body: Mapping[str, Any]) -> str:
    """Of everything in the file but the checksum itself."""
    rest = {key: value for key, value in body.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"key {', '.join(map(repr, twice))} stands twice in one object")
    return dict(pairs)


def _allowlist(data: Any) -> Allowlist:
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError("this is some other JSON file: it has no 'schema'")
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r}, but this version of parity reads schema {SCHEMA}")
    if unknown := sorted(set(data) - {"schema", "about", "checksum", "environments", "certificates"}):
        raise ValueError(f"has keys that no allowlist has: {', '.join(unknown)}")
    environments = _words(data["environments"], "environments")
    if not isinstance(data["certificates"], list):
        raise ValueError("'certificates' must be a list")
    certificates = tuple(_certificate(entry, number) for number, entry in enumerate(data["certificates"], 1))
    keys = [(c.id, c.measured_on) for c in certificates]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"{twice[0][0]} is certified twice on {twice[0][1]}")
    for certificate in certificates:
        if certificate.measured_on not in environments:
            raise ValueError(f"{certificate.id} was measured on {certificate.measured_on!r}, which 'environments' does not list")
    if data["checksum"] != checksum(data):
        raise ValueError("edited by hand: its content does not give its checksum")
    return Allowlist(tuple(sorted(certificates)), environments)


def _certificate(entry: Any, number: int) -> Certificate:
    where = f"certificate {number}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object")
    where = str(entry.get("id") or where)
    if entry.get("verdict") != "certified":
        raise ValueError(f"{where} has the verdict {entry.get('verdict')!r}; an allowlist holds only 'certified'")
    known = ({f.name for f in fields(Certificate)} - {"grade", "proof", "slower"}) | {"id", "verdict"}
    if entry.get("mode") == "training":
        entry = _NOT_OF_TRAINING | entry
    if set(entry) - _OPTIONAL != known:
        wrong = [f"lacks {n}" for n in sorted(known - set(entry))]
        wrong += [f"has an unknown {n}" for n in sorted(set(entry) - known - _OPTIONAL)]
        raise ValueError(f"{where} {', '.join(wrong)}")
    words = {n: _word(entry[n], f"{where}: {n}") for n in ("zoo", "family", "task", "mode", "measured_on", "boundary", "kernels")}
    if words["mode"] not in _MODES:
        raise ValueError(f"{where}: mode {words['mode']!r} is none of {', '.join(_MODES)}")
    if not isinstance(entry["derived_reads"], bool):
        raise ValueError(f"{where}: derived_reads must be true or false, not {entry['derived_reads']!r}")
    place = entry["environment"]
    if not isinstance(place, dict) or set(place) != {f.name for f in fields(Environment)}:
        raise ValueError(f"{where}: environment must name {', '.join(f.name for f in fields(Environment))}, and nothing else")
    certificate = Certificate(
        environment=Environment(**{n: _word(v, f"{where}: environment {n}") for n, v in place.items()}),
        tried=_tried(entry["tried"], where),
        derived_reads=entry["derived_reads"],
        unseen=_words(entry["unseen"], f"{where}: unseen"),
        rows=_words(entry["rows"], f"{where}: rows"),
        grade=_word(entry.get("class") or "", f"{where}: class"),
        proof=_proof(entry.get("proof")),
        slower=_tried(entry["slower"], where, "slower") if entry.get("slower") else (),
        **words,
    )
    if entry["id"] != certificate.id:
        raise ValueError(f"{where} contradicts its own fields, which say {certificate.id}")
    for row in certificate.rows:
        if not row.startswith(certificate.id + "/"):
            raise ValueError(f"{where} rests on the row {row}, which is another family's")
    return certificate


def _proof(told: Any) -> tuple[str, ...]:
    """What proves a class of training is for people: whatever form it has, it is kept as texts."""
    texts = told if isinstance(told, list) else [told] if told else []
    return tuple(text if isinstance(text, str) else json.dumps(text, sort_keys=True) for text in texts)


def _tried(entries: Any, where: str, name: str = "tried") -> tuple[Tried, ...]:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: {name} must list at least one shape")
    found = []
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != {f.name for f in fields(Tried)}:
            raise ValueError(f"{where}: each of {name} has {', '.join(f.name for f in fields(Tried))}, not {entry!r}")
        shapes = entry["shapes"]
        numbers = [entry["size"], entry["batch"], *(n for s in shapes for n in s)] if isinstance(shapes, list) else [None]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise ValueError(f"{where}: sizes, batches and shapes are whole numbers, not {entry!r}")
        found.append(Tried(entry["size"], entry["batch"], _word(entry["dtype"], f"{where}: dtype"), tuple(tuple(s) for s in shapes)))
    return tuple(found)


def _word(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, not {value!r}")
    return value


def _words(values: Any, where: str) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{where} must be a list of texts, not {values!r}")
    return tuple(_word(value, where) for value in values)
