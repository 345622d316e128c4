"""The reader of the allowlist: what it covers, which files it refuses, and that it needs no torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.runtime import allowlist as module
from parity.runtime.allowlist import (
    FILE,
    SCHEMA,
    Allowlist,
    AllowlistError,
    Certificate,
    Environment,
    Tried,
    arch_name,
    checksum,
    covers,
    default_path,
    gap,
    is_slower,
)  # fmt: skip
from parity.runtime.errors import ParityError

HERE = Environment("sm90", "2.11.0+cu130", "13.0", "91900", "1.6.0")
YOLOX = Certificate(
    "libreyolo", "yolox", "detect", "inference", "h200", HERE,
    (Tried(64, 1, "float32", ((1, 3, 64, 64),)), Tried(64, 2, "float32", ((2, 3, 64, 64),))),
    boundary="forward", derived_reads=True, unseen=("aten::x",), kernels="ab12",
    rows=("libreyolo/yolox/detect/inference/64px-b1-float32/graphed",),
)  # fmt: skip


def _body(*certificates: Certificate, **changes: Any) -> dict[str, Any]:
    entries = [c.to_dict() for c in certificates]
    body = {"schema": SCHEMA, "about": "", "environments": ["h200"], "certificates": entries} | changes
    return json.loads(json.dumps(body))


def _write(path: Path, body: dict[str, Any]) -> Path:
    """A file whose checksum is right, so that only what the body says can be at fault."""
    path.write_text(json.dumps(body | {"checksum": checksum(body)}))
    return path


def _entry(**changes: Any) -> dict[str, Any]:
    return YOLOX.to_dict() | changes


WORDS = st.text("abc", min_size=1, max_size=3)
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=3).map(tuple)
CERTIFICATES = st.builds(
    Certificate,
    WORDS, WORDS, WORDS, st.sampled_from(("inference", "training")), st.just("h200"),
    st.builds(Environment, WORDS, WORDS, WORDS, WORDS, WORDS),
    st.lists(st.builds(Tried, st.integers(0, 9), st.integers(0, 9), WORDS, SHAPES), min_size=1, max_size=3).map(tuple),
    WORDS, st.booleans(), st.lists(WORDS, max_size=2).map(tuple), WORDS, st.just(()), st.sampled_from(("", "exact")),
    st.lists(WORDS, max_size=2).map(tuple), st.lists(st.builds(Tried, st.just(0), st.just(1), WORDS, SHAPES), max_size=2).map(tuple),
)  # fmt: skip


@given(st.lists(CERTIFICATES, max_size=4, unique_by=lambda c: c.id))
def test_what_is_written_reads_back(tmp_path_factory, certificates):
    path = _write(tmp_path_factory.mktemp("list") / FILE, _body(*certificates))
    assert Allowlist.load(path) == Allowlist(tuple(sorted(certificates)), ("h200",))


def test_find():
    there = replace(YOLOX, measured_on="b200", environment=replace(HERE, arch="sm100"))
    found = Allowlist((there, YOLOX), ("b200", "h200"))
    assert found.find("libreyolo", "yolox", "detect") == there
    assert found.find("libreyolo", "yolox", "detect", environment=HERE) == YOLOX
    assert found.find("libreyolo", "yolox", "detect", "training") is None
    assert found.find("libreyolo", "ppyoloe", "detect", environment=HERE) is None


def test_covers_what_was_tried_where_it_was_tried():
    assert covers(YOLOX, HERE, [(1, 3, 64, 64)], "float32")
    assert covers(YOLOX, HERE, [[2, 3, 64, 64]], "float32")
    told = {
        gap(YOLOX, HERE, [(3, 3, 64, 64)], "float32"): "was not tried with inputs 3x3x64x64 in float32",
        gap(YOLOX, HERE, [(1, 3, 64, 64)], "float16"): "was not tried with inputs 1x3x64x64 in float16",
        gap(YOLOX, HERE, [], "float32"): "without tensors",
        gap(YOLOX, HERE, [(1, 3, 64, 64), ()], "float32"): "1x3x64x64 scalar",
        gap(YOLOX, replace(HERE, zoo="1.7"), [(1, 3, 64, 64)], "float32"): "with libreyolo's version 1.6.0, this is 1.7",
        gap(YOLOX, replace(HERE, cudnn=""), [(1, 3, 64, 64)], "float32"): "with cudnn 91900, this is unknown",
        gap(YOLOX, replace(HERE, arch="sm100"), [(1, 3, 64, 64)], "float32"): "with arch sm90",
        gap(YOLOX, replace(HERE, torch="2.12"), [(1, 3, 64, 64)], "float32"): "with torch 2.11.0+cu130",
        gap(YOLOX, replace(HERE, cuda="12.8"), [(1, 3, 64, 64)], "float32"): "with cuda 13.0",
    }
    assert len(told) == 9
    for sentence, part in told.items():
        assert part in sentence
        assert sentence.startswith("libreyolo/yolox/detect/inference was ")


TRAINED = replace(YOLOX, mode="training", tried=(Tried(64, 2, "bfloat16", ((2, 3, 64, 64), (2, 50, 5))),), rows=())


def test_a_training_certificate_is_about_what_the_network_is_given():
    assert covers(TRAINED, HERE, [(2, 3, 64, 64)], "bfloat16")
    assert not covers(TRAINED, HERE, [(2, 3, 64, 64)], "float32")
    assert not covers(TRAINED, HERE, [(2, 50, 5)], "bfloat16")
    assert not covers(replace(TRAINED, mode="inference"), HERE, [(2, 3, 64, 64)], "bfloat16")


@pytest.mark.parametrize(
    ("proof", "kept"),
    [("autocast", ("autocast",)), (["a", "b"], ("a", "b")), ({"by": ["x"]}, ('{"by": ["x"]}',)), (None, ()), ([1], ("1",))],
)
def test_a_training_entry_is_read_as_it_comes(tmp_path, proof, kept):
    entry = TRAINED.to_dict() | {"class": "exact", "proof": proof}
    for name in ("boundary", "derived_reads", "unseen", "kernels"):  # what only a forward has
        del entry[name]
    (found,) = Allowlist.load(_write(tmp_path / FILE, _body(certificates=[entry]))).certificates
    assert (found.grade, found.proof, found.tried) == ("exact", kept, TRAINED.tried)
    assert (found.boundary, found.unseen) == ("", ())


def test_what_is_slower_is_known_where_it_was_measured():
    slow = replace(YOLOX, slower=(Tried(64, 1, "float32", ((1, 3, 64, 64),)),))
    assert is_slower(slow, HERE, [[1, 3, 64, 64]], "float32")
    assert not is_slower(slow, HERE, [(2, 3, 64, 64)], "float32")
    assert not is_slower(slow, HERE, [(1, 3, 64, 64)], "float16")
    assert not is_slower(slow, replace(HERE, torch="2.12"), [(1, 3, 64, 64)], "float32")
    assert not is_slower(YOLOX, HERE, [(1, 3, 64, 64)], "float32")


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": (_body(YOLOX, schema=0), r"schema 0, but this version of parity reads schema 1"),
    "foreign": ({"families": []}, r"some other JSON file: it has no 'schema'"),
    "unknown key": (_body(extra=1), r"keys that no allowlist has: extra"),
    "no environments": ({"schema": SCHEMA, "certificates": []}, r"lacks 'environments'"),
    "environments": (_body(environments="h200"), r"environments must be a list"),
    "certificates": (_body(certificates={}), r"'certificates' must be a list"),
    "not an object": (_body(certificates=[1]), r"certificate 1 is not an object"),
    "twice": (_body(YOLOX, YOLOX), r"yolox/detect/inference is certified twice on h200"),
    "verdict": (_body(certificates=[_entry(verdict="screened")]), r"the verdict 'screened'; an allowlist holds only"),
    "verdict word": (_body(certificates=[_entry(verdict="fine")]), r"yolox.* has the verdict 'fine'"),
    "id": (_body(certificates=[_entry(id="libreyolo/yolo9/detect/inference")]), r"contradicts its own fields, which say"),
    "mode": (_body(certificates=[_entry(mode="eval")]), r"mode 'eval' is none of"),
    "field lost": (_body(certificates=[{k: v for k, v in _entry().items() if k != "tried"}]), r"lacks tried"),
    "field more": (_body(certificates=[_entry(fast=True)]), r"has an unknown fast"),
    "nothing tried": (_body(certificates=[_entry(tried=[])]), r"tried must list at least one"),
    "class": (_body(certificates=[_entry(**{"class": 1})]), r"class must be text"),
    "slower": (_body(certificates=[_entry(slower=[{"size": 1}])]), r"each of slower has size, batch, dtype, shapes"),
    "unseen lost": (_body(certificates=[{k: v for k, v in _entry().items() if k != "unseen"}]), r"lacks unseen"),
    "tried": (_body(certificates=[_entry(tried=[{"size": 1}])]), r"each of tried has size, batch, dtype, shapes"),
    "shape": (
        _body(certificates=[_entry(tried=[{"size": 1, "batch": 1, "dtype": "x", "shapes": [["a"]]}])]),
        r"whole numbers",
    ),
    "flag": (_body(certificates=[_entry(derived_reads="no")]), r"derived_reads must be true or false"),
    "text": (_body(certificates=[_entry(kernels=3)]), r"kernels must be text, not 3"),
    "place": (_body(certificates=[_entry(environment={"arch": "sm90"})]), r"environment must name arch, torch"),
    "unlisted place": (_body(YOLOX, environments=[]), r"measured on 'h200', which 'environments' does not list"),
    "another's row": (_body(certificates=[_entry(rows=["a/b/c/d/e/f"])]), r"rests on the row a/b/c/d/e/f"),
}  # fmt: skip


@pytest.mark.parametrize("kind", EDITS)
def test_a_file_at_odds_with_itself_is_an_error(tmp_path, kind):
    body, message = EDITS[kind]
    path = _write(tmp_path / FILE, body)
    with pytest.raises(AllowlistError, match=message) as caught:
        Allowlist.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith("regenerate it from the evidence with `parity report`, never by hand")
    assert isinstance(caught.value, ParityError)


def test_an_edit_that_is_consistent_is_found_by_the_checksum(tmp_path):
    path = _write(tmp_path / FILE, _body(YOLOX))
    path.write_text(path.read_text().replace("yolox", "yolo9"))
    with pytest.raises(AllowlistError, match="edited by hand: its content does not give its checksum"):
        Allowlist.load(path)
    path.write_text(json.dumps(_body(YOLOX)))
    with pytest.raises(AllowlistError, match="lacks 'checksum'"):
        Allowlist.load(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not an allowlist: Expecting"),
        (b"\xff\xfe", "not an allowlist: .*codec"),
        (b'{"schema": 1, "schema": 2}', "key 'schema' stands twice"),
        (b"", "not an allowlist: Expecting"),
    ],
)
def test_a_file_that_is_no_json(tmp_path, data, message):
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(AllowlistError, match=message):
        Allowlist.load(tmp_path / FILE)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(AllowlistError, match="no such allowlist; `parity report` writes it"):
        Allowlist.load(tmp_path / FILE)
    with pytest.raises(AllowlistError, match="cannot be read"):
        Allowlist.load(tmp_path)


def test_where_an_installation_looks(tmp_path, monkeypatch):
    package = tmp_path / "site" / "parity"
    (package / "runtime").mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(package / "runtime" / "allowlist.py"))
    assert default_path() == tmp_path / "site" / "reports" / FILE
    (package / "reports").mkdir()
    _write(package / "reports" / FILE, _body(YOLOX))
    assert default_path() == package / "reports" / FILE
    assert Allowlist.packaged().certificates == (YOLOX,)


@pytest.mark.parametrize("value", [(9, 0), "9.0", "sm_90", "sm90", [9, 0]])
def test_arch_names(value):
    assert arch_name(value) == "sm90"
    assert arch_name("") == ""


def _imports(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return names | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}


def test_it_imports_the_standard_library_alone():
    def foreign(text: str) -> set[str]:
        return {n for n in _imports(text) if n.partition(".")[0] not in sys.stdlib_module_names}

    assert foreign(Path(module.__file__).read_text()) == {"parity.runtime.errors"}
    assert foreign("import torch.nn\nfrom pandas import x") == {"torch.nn", "pandas"}, "this check can fail"


def test_it_reads_without_torch(tmp_path):
    path = _write(tmp_path / FILE, _body(YOLOX))
    code = f"""
import importlib.util, sys, types
sys.modules["torch"] = None
def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
sys.modules["parity"], sys.modules["parity.runtime"] = types.ModuleType("parity"), types.ModuleType("parity.runtime")
load("parity.runtime.errors", {str(Path(module.__file__).with_name("errors.py"))!r})
print(load("parity.runtime.allowlist", {module.__file__!r}).Allowlist.load({str(path)!r}).certificates[0].id)
"""
    told = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "libreyolo/yolox/detect/inference\n"
