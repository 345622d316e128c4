"""A certificate is fresh while protocol, family, judge and zoo are the same; each of them alone makes it stale."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import parity
from parity.judge.outcome import PROTOCOL
from parity.record import fresh
from parity.record.fresh import fingerprint, judge_fingerprint, missing_or_stale, stale
from parity.rows.family import Expect, Family, Fixed
from parity.rows.row import MODES, Row, Settings
from parity.rows.training import Training

from . import records
from .records import YOLO9, build, draw, failing, family, record, trained, training


def closed_over(name: str) -> object:
    def built(settings: Settings) -> str:
        return name

    return built


def with_partial(name: str, settings: Settings) -> str:
    return name


CHANGES = {
    "name": {"name": "other"},
    "sizes": {"sizes": (64,)},
    "other_batch": {"other_batch": None},
    "expected": {"expected": {"bare": (Expect("wrong", "for a new reason"),)}},
    "builder": {"build": closed_over("a")},
    "what it closes over": {"build": closed_over("b")},
    "partial": {"build": functools.partial(with_partial, "a")},
    "its arguments": {"build": functools.partial(with_partial, "b")},
    "a default": {"build": lambda settings, name="a": name},
    "another default": {"build": lambda settings, name="b": name},
    "inputs": {"inputs": lambda size, batch: (Fixed((1, 2)),)},
    "method": {"build": "a".startswith},
}


def test_every_part_of_a_declaration_counts():
    prints = {fingerprint(family()), *(fingerprint(dataclasses.replace(family(), **c)) for c in CHANGES.values())}
    assert len(prints) == len(CHANGES) + 1
    assert fingerprint(family()) == fingerprint(family())


TRAINING_CHANGES = {
    "name": {"name": "other"},
    "size": {"size": 32},
    "other size": {"other_size": 96},
    "batch": {"batch": 4},
    "accumulate": {"accumulate": 3},
    "dtypes": {"dtypes": ("float16",)},
    "seam": {"seam": "backbone and encoder"},
    "mechanism": {"mechanism": "encoder"},
    "builder": {"build": closed_over("a")},
    "what it closes over": {"build": closed_over("b")},
    "draw": {"draw": functools.partial(draw, probe="A")},
    "expected": {"expected": {"native": (Expect("wrong", "for a new reason"),)}},
    "expected dtypes": {"expected": {"native": (Expect("wrong", "for a new reason", dtypes=("float32",)),)}},
}


def test_every_part_of_a_training_declaration_counts():
    prints = {fingerprint(training()), *(fingerprint(dataclasses.replace(training(), **c)) for c in TRAINING_CHANGES.values())}
    assert len(prints) == len(TRAINING_CHANGES) + 1
    assert fingerprint(training()) == fingerprint(training())
    assert fingerprint(training()) != fingerprint(family())


def test_the_source_of_the_builder_counts(tmp_path):
    prints = []
    for body in ("return 1", "return 2"):
        file = tmp_path / "built.py"
        file.write_text(f"def build(settings):\n    {body}\n")
        space: dict[str, object] = {"__name__": "built"}
        exec(compile(file.read_text(), str(file), "exec"), space)
        fresh._source.cache_clear()
        prints.append(fingerprint(dataclasses.replace(family(), build=space["build"])))
    fresh._source.cache_clear()
    assert prints[0] != prints[1]


def test_a_fingerprint_is_the_same_in_another_process():
    names = f"from {records.__name__} import YOLO9; from parity.record.fresh import *; from parity.rows.row import MODES"
    asked = "print(fingerprint(YOLO9), *(judge_fingerprint(mode, 'cuda') for mode in MODES))"
    code = f"import sys; sys.path[:] = {sys.path!r}; {names}; {asked}"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert told.stdout.split() == [fingerprint(YOLO9), *(judge_fingerprint(mode, "cuda") for mode in MODES)]


def test_every_source_counts_by_name_and_code(tmp_path):
    (tmp_path / "deeper").mkdir()
    file = tmp_path / "deeper" / "bits.py"
    file.write_text("a = 1\n")
    prints = [fresh.sources_hash(tmp_path, ["deeper/bits.py"])]
    file.write_text("a = 2\n")
    prints.append(fresh.sources_hash(tmp_path, ["deeper/bits.py"]))
    file.rename(tmp_path / "bits.py")
    prints.append(fresh.sources_hash(tmp_path, ["bits.py"]))
    assert len(set(prints)) == 3


def test_what_the_judge_imports_is_found_however_deep():
    package = Path(parity.__file__).parent
    found = fresh.imported(package, "judge/inference.py")
    inside = {"judge/bits.py", "judge/walk.py", "judge/script.py", "runtime/cuda.py", "runtime/runner.py", "runtime/emulated/tape.py"}
    assert inside <= found
    assert not found & {"cli.py", "judge/verdict.py", "record/fresh.py", "run/worker.py", "rows/discovery.py"}


PACKAGE = {
    "__init__": "",
    "judge/__init__": "",
    "judge/judging": "def judge():\n    from small.judge import inference, training",
    "judge/inference": "from small.judge import bits, walk",
    "judge/walk": "",
    "judge/training": "from small.judge import bits\nfrom small.runtime import step",
    "judge/bits": "",
    "runtime/step": "",
}


def _prints(folder: Path, **edits: str) -> dict[str, str]:
    """The fingerprints of a small package with code added to files: ``judge__bits="x = 1"``."""
    files = dict(PACKAGE)
    for name, code in edits.items():
        name = name.replace("__", "/")
        files[name] = f"{files.get(name, '')}\n{code}\n"
    for name, text in files.items():
        path = folder / "small" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {
        f"{mode} on {engine}": judge_fingerprint(mode, engine, folder / "small") for mode in MODES for engine in ("cuda", "emulated")
    }


@pytest.mark.parametrize(
    ("edits", "stale"),
    [
        ({}, ()),
        ({"judge__training": "x = 1"}, ("training",)),
        ({"runtime__step": "x = 1"}, ("training",)),
        ({"judge__quorum": "x = 1"}, ()),
        ({"judge__quorum": "x = 1", "judge__training": "from small.judge import quorum"}, ("training",)),
        ({"judge__judging": "x = 1"}, ()),
        ({"judge__inference": "x = 1"}, ("inference",)),
        ({"judge__walk": "x = 1"}, ("inference",)),
        ({"judge__bits": "x = 1"}, ("inference", "training")),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_a_change_of_one_modes_judge_leaves_the_evidence_of_the_other_fresh(tmp_path, edits, stale):
    base, edited = _prints(tmp_path / "base"), _prints(tmp_path / "edited", **edits)
    changed = [name.split(" on ") for name in base if edited[name] != base[name]]
    assert tuple(dict.fromkeys(mode for mode, _ in changed)) == stale
    assert [engine for _, engine in changed] == ["cuda", "emulated"] * len(stale)


def test_what_emulates_a_device_does_not_touch_the_evidence_of_a_real_one(tmp_path):
    asks = {
        "runtime__engine": "def engine(): from small.runtime.emulated import device",
        "judge__bits": "from small.runtime import engine",
    }
    base = _prints(tmp_path / "base", runtime__emulated__device="", **asks)
    edited = _prints(tmp_path / "edited", runtime__emulated__device="x = 1", **asks)
    assert [name for name in base if edited[name] != base[name]] == ["inference on emulated", "training on emulated"]


def test_what_training_alone_needs_does_not_touch_the_evidence_of_inference(tmp_path):
    """In a copy of this very package."""
    copies = [tmp_path / name / "parity" for name in ("base", "edited")]
    shutil.copytree(Path(parity.__file__).parent, copies[0], ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(*copies)
    mine, others = (fresh.imported(copies[0], f"judge/{mode}.py") for mode in ("training", "inference"))
    alone = sorted(mine - others)
    assert "judge/training.py" in alone
    for name in alone:
        with (copies[1] / name).open("a") as file:
            file.write("\nadded = 1\n")
    prints = [{mode: judge_fingerprint(mode, "cuda", copy) for mode in MODES} for copy in copies]
    assert prints[0]["inference"] == prints[1]["inference"]
    assert prints[0]["training"] != prints[1]["training"]


def test_evidence_is_stale_by_the_judge_of_its_own_mode(monkeypatch):
    entries = [record(), trained()]
    real = judge_fingerprint
    monkeypatch.setattr(fresh, "judge_fingerprint", lambda mode, engine: "0" * 16 if mode == "training" else real(mode, engine))
    reasons = [stale(entry, entry["fingerprint"], entry["zoo_version"]) for entry in entries]
    assert reasons[0] == ""
    assert "the judge or the runtime changed" in reasons[1]


def test_a_family_and_its_training_are_stale_apart():
    inference, trains = family(), training()
    entries = [record(), trained()]
    rows = [Row.parse(entry["id"]) for entry in entries]

    def due(*declared: Family | Training) -> list[str]:
        found = missing_or_stale(rows, entries, lambda row: {d.mode: d for d in declared}[row.mode], {"libreyolo": "1.6.0"})
        return [row.mode for row, _ in found]

    assert due(inference, trains) == []
    assert due(family(other_size=32), trains) == ["inference"]
    assert due(inference, training(batch=2, accumulate=3)) == ["training"]


def test_imports_of_every_form_are_followed(tmp_path):
    package = tmp_path / "zoo"
    (package / "deep").mkdir(parents=True)
    forms = {"a": "import zoo.b", "b": "from zoo import c", "c": "from zoo.deep.d import x", "e": "x = 1", "g": "x = 1"}
    for name, text in forms.items():
        (package / f"{name}.py").write_text(text)
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "d.py").write_text(
        "def f():\n    from . import h\n    from ..e import x\nif TYPE_CHECKING:\n    import zoo.g\n"
    )
    (package / "deep" / "h.py").write_text("import a_stranger")
    assert fresh.imported(package, "a.py") == {"a.py", "b.py", "c.py", "deep/__init__.py", "deep/d.py", "deep/h.py", "e.py"}


def test_each_change_alone_makes_evidence_stale():
    entry = record()
    same = (entry["fingerprint"], entry["zoo_version"])
    assert stale(entry, *same) == ""
    assert "family's declaration" in stale(entry, "0" * 16, same[1])
    assert "the version of libreyolo changed: '1.6.0' then, '1.7.0' now" in stale(entry, same[0], "1.7.0")
    assert "the protocol changed" in stale(entry | {"protocol": PROTOCOL + 1}, *same)
    assert "the judge or the runtime changed" in stale(entry | {"judge": "0" * 16}, *same)


def _due(entries: list[records.Record], of: Family, version: str = "1.6.0") -> list[tuple[str, str]]:
    rows = [row for row in of.rows() if row.settings == Settings(64)]
    return [(row.arm, why) for row, why in missing_or_stale(rows, entries, lambda _: of, {"libreyolo": version})]


def test_what_is_due():
    of = family()
    every = [record(arm, of=of) for arm in of.arms]
    assert _due(every, of) == []
    assert _due(every[1:], of) == [("bare", "no evidence yet")]
    assert [arm for arm, _ in _due(every, of, "1.7.0")] == ["bare", "graphed", "native"]
    assert [arm for arm, _ in _due(every, family(other_size=32))] == ["bare", "graphed", "native"]
    assert _due([*every, record("native", of=of, status="timed_out")], of) == [("native", "was not judged: timed_out")]
    judged = failing("replay", "unknown")
    assert _due([*every, record("native", judged, of=of)], of) == [], "an unexpected verdict is a result, not a gap"


def test_a_crash_that_is_declared_is_a_result():
    of = family(expected={"native": (Expect("crashed", "its own capture kills the process"),)})
    every = [record("bare", of=of), record("graphed", of=of), record("native", of=of, status="crashed")]
    assert _due(every, of) == []


@pytest.mark.parametrize("thing", [build, sys, [{1, 2}], {"a": object()}, Settings, b"x", len])
def test_told_has_no_addresses(thing):
    assert " at 0x" not in repr(fresh._told(thing))


def test_what_refers_to_itself_ends():
    loop: list[object] = []
    loop.append(loop)
    assert "itself" in repr(fresh._told(loop))


def test_only_code_counts():
    plain = "def f(x):\n    return x + 1\n"
    told = '"""A module."""\n\n# why\ndef f(x):\n    """Adds\n    one."""\n    return x + 1  # one more\n'
    assert fresh.code_of(told) == fresh.code_of(plain)
    assert fresh.code_of(plain.replace("1", "2")) != fresh.code_of(plain)
    assert fresh.code_of('x = "# no comment"\n') != fresh.code_of('x = "# another"\n')
    assert fresh.code_of("no python (") == "no python ("
