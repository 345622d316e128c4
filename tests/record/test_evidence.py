"""Evidence survives kills, full disks and other processes; whatever is not ours is an error that names file and line."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.judge.outcome import CAUSES, CLASSES, INFERENCE_CHECKS, Check, Outcome
from parity.judge.verdict import verdict_of
from parity.record import evidence
from parity.record.evidence import EvidenceFile, evidence_path, latest, merge, read_all, read_evidence, render
from parity.record.files import RecordError, write_atomic
from parity.record.grade import FIELDS
from parity.record.line import environment_name, is_expected, mark_healed, outcome_of, record_of, validate
from parity.rows.family import Expect
from parity.rows.row import Row

from .records import (
    CPU,
    CPU_NAME,
    H200,
    H200_NAME,
    PPYOLOE,
    YOLO9,
    failing,
    family,
    one_failed,
    record,
    small_matrix,
    small_training,
    told,
    trained,
    training,
    write,
)  # fmt: skip

TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CHECKS = st.lists(
    st.builds(
        Check,
        st.sampled_from(INFERENCE_CHECKS),
        st.sampled_from(("passed", "failed", "skipped")),
        TEXT,
        st.sampled_from(("", *CAUSES)),
        TEXT,
        st.dictionaries(TEXT, JSON, max_size=3),
    ),
    max_size=4,
).map(lambda checks: [*checks, Check("replay", "passed")])


@given(CHECKS, st.sampled_from(("cuda", "emulated")), TEXT, st.integers(0), st.floats(0, 1e6))
def test_a_record_read_back_gives_its_outcome_and_verdict(checks, engine, note, seed, seconds):
    entry = record(checks=checks, engine=engine, notes=(note,), seed=seed, seconds={"judge": seconds})
    back = json.loads(render([entry]))
    assert back == entry
    validate(back)
    found = verdict_of(outcome_of(back), engine)
    assert (found.verdict, found.cause, found.where) == (entry["verdict"], entry["cause"], entry["where"])


NAMES = st.from_regex(r"[a-z0-9:_-]{1,12}", fullmatch=True)
TRAINING = st.builds(
    lambda name, proof, cause, tensors, more: told(name, *proof, cause=cause, tensors=(min(tensors), max(tensors)), **more),
    st.sampled_from(CLASSES),
    st.lists(NAMES, min_size=1, max_size=3, unique=True),
    st.sampled_from(("", *CAUSES)),
    st.tuples(st.integers(0, 999), st.integers(0, 999)),
    st.fixed_dictionaries(
        {"ops": st.lists(NAMES)} | dict.fromkeys(("tried", "quorum", "trajectory", "p_value", "worst", "max_ulp"), JSON)
    ),
)


@given(TRAINING, st.sampled_from(("float16", "bfloat16", "float32")), st.sampled_from(("cuda", "emulated")))
def test_a_training_record_read_back_gives_its_outcome_and_verdict(says, dtype, engine):
    entry = trained(says=says, dtype=dtype, engine=engine)
    back = json.loads(render([entry]))
    assert back == entry
    validate(back)
    found = outcome_of(back)
    assert found.training == entry["training"]
    assert [entry[name] for name in ("class", "proof", "tensors")] == [says[name] for name in ("class", "proof", "tensors")]
    assert verdict_of(found, engine).verdict == entry["verdict"]


def test_only_training_rows_have_a_class_and_a_proof():
    assert set(trained()) - set(record()) == set(FIELDS)
    assert not set(record()) & set(FIELDS)
    assert (trained()["class"], trained()["proof"], trained()["tensors"]) == ("exact", [], [0, 240])


@pytest.mark.parametrize("status", ["unavailable", "crashed", "timed_out", "out_of_memory", "broken"])
def test_a_training_row_that_was_not_judged_has_none_either(status):
    entry = trained(status=status)
    validate(entry)
    assert [entry[name] for name in FIELDS] == ["", [], [], {}]


def test_an_unproven_row_is_valid_and_has_no_class():
    entry = trained(says=told(""), checks=one_failed("proof", "unknown"))
    validate(entry)
    assert (entry["verdict"], entry["class"], entry["tried"]) == ("unproven", "", [])


def test_a_training_row_was_tried_at_the_shapes_of_its_batch():
    (tried,) = trained()["tried"]
    assert tried == {"size": 64, "batch": 2, "dtype": "float16", "shapes": [[2, 3, 64, 64], [2, 5, 5]]}


COMMITTED = sorted((Path(__file__).parents[2] / "reports" / "evidence").glob("*.jsonl"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_evidence_reads_back_as_it_was_written(path):
    records = read_evidence(path)
    assert records
    assert render(records) == path.read_text()


def test_a_record_has_what_the_design_promises():
    wanted = "schema id zoo family task mode arm engine settings verdict expected cause where checks probes seconds peak_memory "
    wanted += "seed environment command detail check leaves dead_leaves captures replays notes message status healed "
    wanted += "seconds_phases protocol recorded fingerprint"
    assert set(wanted.split()) <= set(record())
    assert record()["seconds"] == 1.75
    assert record()["tried"] == [
        {"size": 64, "batch": 1, "dtype": "float32", "shapes": [[1, 3, 64, 64]]},
        {"size": 96, "batch": 1, "dtype": "float32", "shapes": [[1, 3, 96, 96]]},
        {"size": 64, "batch": 2, "dtype": "float32", "shapes": [[2, 3, 64, 64]]},
    ]


def test_a_skipped_interleave_is_not_tried():
    checks = [Check("replay", "passed"), Check("interleave", "skipped", "one size only")]
    assert [(t["size"], t["batch"]) for t in record(checks=checks)["tried"]] == [(64, 1)]


def test_figures_that_json_cannot_hold_become_text():
    entry = record(checks=[Check("replay", "passed", figures={"worst": float("nan"), "at": (1, 2)})])
    assert entry["checks"][0]["figures"] == {"worst": "nan", "at": [1, 2]}


def test_a_record_refuses_objects():
    with pytest.raises(TypeError, match="plain data, not object"):
        record(checks=[Check("replay", "passed", figures={"thing": object()})])


def test_a_record_refuses_another_rows_outcome():
    row = Row.parse(record()["id"])
    with pytest.raises(ValueError, match="cannot be the evidence of"):
        record_of(Outcome("a/b/c/inference/b1-float32/bare", "crashed"), row, family(), "cuda", "1", "")


def test_a_dead_child_takes_the_environment_it_is_given():
    of = family()
    row = of.rows()[0]
    entry = record_of(Outcome(row.id, "timed_out"), row, of, "cuda", "1", "", environment=H200)
    assert environment_name(entry["environment"], "cuda") == H200_NAME


def test_expected_is_what_the_family_declares():
    stale = failing("churn", "stale-address")
    assert is_expected(record("native", stale, of=YOLO9))
    assert not is_expected(record("native", of=YOLO9)), "unexpectedly better"
    assert not is_expected(record("graphed", stale, of=YOLO9))
    assert not is_expected(record("bare", failing("capture", "unknown"), of=PPYOLOE)), "unknown never counts"
    assert is_expected(record(engine="emulated"))


def test_a_control_must_fail_at_the_check_it_is_for():
    of = family(expected={"bare": (Expect("wrong", "it counts in Python", "python-counter", check="replay"),)})
    assert is_expected(record("bare", failing("replay", "python-counter"), of=of))
    assert not is_expected(record("bare", failing("churn", "python-counter"), of=of))


def test_a_case_that_draws_its_own_inputs_declares_no_shapes():
    assert record(of=family(probes=lambda device: ((), ())))["tried"] == []


@pytest.mark.parametrize(
    ("environment", "engine", "name"),
    [
        (H200, "cuda", H200_NAME),
        (H200 | {"arch": "9.0"}, "cuda", H200_NAME),
        (H200 | {"arch": (9, 0)}, "cuda", H200_NAME),
        (CPU, "emulated", CPU_NAME),
        (H200 | {"gpu": "A/B: ü"}, "cuda", "a-b-sm90-torch2.11.0-cu130"),
    ],
)
def test_environment_names(environment, engine, name):
    assert environment_name(environment, engine) == name
    assert evidence_path("r", environment, engine) == Path(f"r/evidence/{name}.jsonl")
    assert evidence_path("r", environment, engine, "2/3").name == f"{name}.shard-2-of-3.jsonl"


# --- appending


def test_appended_records_are_there_before_the_file_is_compacted(tmp_path):
    path = tmp_path / "evidence" / "a.jsonl"
    file = EvidenceFile.open(path)
    for number, entry in enumerate(small_matrix(), 1):
        file.append(entry)
        assert len(path.read_bytes().splitlines()) == number
    assert read_evidence(path) == sorted(small_matrix(), key=lambda r: r["id"])


def test_a_later_record_replaces_the_earlier_one_and_compacting_sorts(tmp_path):
    old, new = record(seed=1), record(seed=2)
    file = EvidenceFile.open(tmp_path / "a.jsonl")
    for entry in (old, record("bare"), new):
        file.append(entry)
    assert file.records[old["id"]]["seed"] == 2
    file.compact()
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [(r["arm"], r["seed"]) for r in lines] == [("bare", 0), ("graphed", 2)]


def test_compacting_twice_changes_nothing(tmp_path):
    path = write(tmp_path / "a.jsonl", *small_matrix())
    EvidenceFile.open(path).compact()
    once = path.read_bytes()
    EvidenceFile.open(path).compact()
    assert path.read_bytes() == once


def test_compacting_lists_what_the_runtime_heals(tmp_path):
    path = write(tmp_path / "a.jsonl", *small_matrix())
    EvidenceFile.open(path).compact()
    healed = {r["id"]: r["healed"] for r in read_evidence(path) if r["healed"]}
    assert healed == {record(of=YOLO9)["id"]: {"bare": "stale-address", "native": "stale-address"}}


def _append(path: str, number: int) -> None:
    file = EvidenceFile.open(path)
    for seed in range(10):
        file.append(record(of=family(f"f{number}x{seed}")))
        if seed % 5 == 0:
            file.compact()


def test_processes_that_append_and_compact_at_once_lose_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    fork = multiprocessing.get_context("spawn")
    workers = [fork.Process(target=_append, args=(str(path), number)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(read_evidence(path)) == 30


def test_an_append_waits_for_the_lock_and_follows_a_replaced_file(tmp_path):
    path = write(tmp_path / "a.jsonl", record())
    file = EvidenceFile.open(path)
    thread = threading.Thread(target=file.append, args=(record("bare"),))
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "it did not wait"
        write_atomic(path, path.read_text())  # what a compacting process does while it holds the lock
    thread.join(60)
    assert {r["arm"] for r in read_evidence(path)} == {"graphed", "bare"}


def test_an_environment_has_its_own_file(tmp_path):
    file = EvidenceFile.open(tmp_path / "a.jsonl")
    file.append(record())
    with pytest.raises(RecordError, match=f"holds evidence of {H200_NAME}; .* was measured on {CPU_NAME}"):
        file.append(record("bare", engine="emulated"))
    assert len(read_evidence(file.path)) == 1


# --- lines that are not ours


def _edited(**changes: Any) -> str:
    return json.dumps(record("bare") | changes)


UNPROVEN = trained(says=told(""), checks=one_failed("proof", "unknown"))


def _changed(of: Any = None, without: str = "", both: dict[str, Any] | None = None, **changes: Any) -> str:
    """A training record of class ``one_ulp`` with fields changed; ``both``: under ``training`` too."""
    entry = of or trained(says=told("one_ulp", "incoming-layout", tensors=(1, 240)))
    both = both or {}
    entry = entry | both | {"training": entry["training"] | both} | changes
    return json.dumps({name: value for name, value in entry.items() if name != without})


WRONG = failing("replay", "stale-constant")
LINES = {
    "truncated": (_edited()[:200], r"not JSON"),
    "empty": ("", r"not JSON"),
    "foreign": ('{"row": "yolo9", "ok": true}', r"JSON, but not evidence of parity"),
    "a list": ("[1, 2]", r"JSON, but not evidence of parity"),
    "older schema": (_edited(schema=0), r"evidence of schema 0, this version reads 1: .*certify again"),
    "a field lost": (json.dumps({k: v for k, v in record("bare").items() if k != "seed"}), r"bare: lacks seed"),
    "a wrong type": (_edited(captures="one"), r"captures is str 'one'"),
    "id and fields": (_edited(family="other"), r"its family contradicts its id"),
    "no id": (_edited(id="yolox"), r"not a row id"),
    "engine": (_edited(engine="tpu"), r"engine 'tpu' is none of ours"),
    "verdict word": (_edited(verdict="fine"), r"verdict 'fine' is none of ours"),
    "edited verdict": (
        json.dumps(record("bare", WRONG) | {"verdict": "certified", "cause": "", "detail": "", "check": ""}),
        r"row libreyolo/yolox/.*/bare: edited by hand: it says verdict 'certified' where the checks give 'wrong'",
    ),
    "verdict of another judge": (
        json.dumps(record("bare", WRONG) | {"verdict": "unproven", "judge": "0" * 16}),
        r"edited by hand, or of another judge: it says verdict 'unproven' where the checks give 'wrong'",
    ),
    "edited cause": (json.dumps(record("bare", WRONG) | {"cause": "rng"}), r"cause 'rng' where the checks give"),
    "check without a name": (_edited(checks=[{"status": "passed"}]), r"not an outcome"),
    "check with an odd status": (_edited(checks=[{"name": "replay", "status": "fine"}]), r"the status 'fine'"),
    "check with a name that is none": (_edited(checks=[{"name": ["replay"], "status": "passed"}]), r"a check's name is"),
    "check with figures that are none": (
        _edited(checks=[{"name": "replay", "status": "passed", "figures": 3}]),
        r"a check's figures is '3'",
    ),
    "leaves without names": (_edited(leaves=[["y"]]), r"leaves holds what is no text"),
    "an environment of numbers": (
        _edited(environment=record()["environment"] | {"arch": 9.0}),
        r"environment holds what is no text: .*9\.0",
    ),
    "a declaration without a reason": (_edited(expected="wrong"), r"an expected 'wrong' needs a reason"),
    "ops that are none": (_changed(both={"ops": 3}), r"ops holds what is no text: 3"),
    "proves nothing": (_edited(checks=[]), r"this record proves nothing"),
    "a class in inference": (_edited(**{"class": "exact"}), r"a row of mode inference has no class"),
    "training without a class": (_changed(without="class"), r"a row of mode training lacks class"),
    "training without itself": (_changed(without="training"), r"a row of mode training lacks training"),
    "training that is a list": (_changed(training=["exact"]), r"training is list"),
    "edited class": (_changed(**{"class": "exact"}), r"its class contradicts what stands under training"),
    "edited proof": (_changed(proof=["a"]), r"its proof contradicts what stands under training"),
    "edited count": (_changed(tensors=[0, 240]), r"its tensors contradicts what stands under training"),
    "a class of its own": (_changed(both={"class": "nearly"}), r"certified, but of class 'nearly': exact, one_ulp, "),
    "safe without a class": (_changed(both={"class": ""}), r"certified, but of class ''"),
    "a class without a proof": (_changed(both={"proof": []}), r"of class one_ulp without a proof: that is unproven"),
    "a proof of one word": (_changed(both={"proof": "incoming-layout"}), r"proof must be a list of names"),
    "a proof with a comma": (_changed(both={"proof": ["a, b"]}), r"proof must be a list of names without commas"),
    "more differ than there are": (_changed(both={"tensors": [3, 2]}), r"tensors must be how many differ and how many there are"),
    "a count of truths": (_changed(both={"tensors": [False, 2]}), r"tensors must be how many differ"),
    "unproven, made certified": (
        json.dumps(
            UNPROVEN
            | {"verdict": "certified", "cause": "", "detail": "", "check": "", "class": "exact"}
            | {"training": UNPROVEN["training"] | {"class": "exact"}}
        ),
        r"edited by hand: it says verdict 'certified' where the checks give 'unproven'",
    ),
    "unproven with a class": (
        _changed(of=UNPROVEN, both={"class": "exact"}),
        r"unproven, but of class 'exact': only safe rows have one",
    ),
    "another environment": (json.dumps(record("bare", engine="emulated")), r"one file per environment"),
    "not text": ("\udcff\udcfe", r"not JSON"),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_line_that_is_not_ours_is_an_error_with_file_and_line(tmp_path, kind):
    line, message = LINES[kind]
    path = write(tmp_path / "a.jsonl", record())
    with path.open("ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n" + render([record("native")]).encode())
    before = path.read_bytes()
    for read in (read_evidence, EvidenceFile.open):
        with pytest.raises(RecordError, match=message) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}:2: ")
    assert path.read_bytes() == before


def test_a_file_that_is_not_there_or_cannot_be_read(tmp_path):
    with pytest.raises(RecordError, match=r"a\.jsonl: no such evidence; `parity certify` writes it"):
        read_evidence(tmp_path / "a.jsonl")
    with pytest.raises(RecordError, match="cannot be read"):
        read_evidence(tmp_path)
    with pytest.raises(RecordError, match=f"no evidence here; `parity certify --reports {tmp_path}` writes it"):
        read_all(tmp_path)


# --- killed while writing


@given(st.integers(min_value=1))
def test_a_line_cut_anywhere_loses_no_other_row(tmp_path_factory, cut):
    path = write(tmp_path_factory.mktemp("cut") / "a.jsonl", record())
    line = render([record("bare")]).encode()
    cut = 1 + cut % (len(line) - 1)
    with path.open("ab") as file:
        file.write(line[:cut])
    with pytest.raises(RecordError, match=r":2: the last line was cut off .*`parity certify --resume`"):
        read_evidence(path)
    file = EvidenceFile.open(path)
    whole = cut == len(line) - 1
    assert len(file.messages) == 1
    assert ("completed" if whole else "moved to a.jsonl.partial") in file.messages[0]
    assert {r["arm"] for r in read_evidence(path)} == ({"graphed", "bare"} if whole else {"graphed"})
    partial = path.with_name("a.jsonl.partial")
    assert partial.exists() != whole
    assert whole or partial.read_bytes() == line[:cut] + b"\n"
    file.append(record("native"))
    assert "native" in {r["arm"] for r in read_evidence(path)}


# --- full disk


def _full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_append_keeps_every_finished_row(tmp_path, monkeypatch):
    file = EvidenceFile.open(tmp_path / "a.jsonl")
    file.append(record())
    before = file.path.read_bytes()
    real = os.write
    for write_some in (_full, lambda fd, data: real(fd, data[:100])):
        monkeypatch.setattr(os, "write", write_some)
        with pytest.raises(RecordError, match=r"a\.jsonl: the disk is full .*`parity certify --resume`"):
            file.append(record("bare"))
        monkeypatch.setattr(os, "write", real)
        assert file.path.read_bytes() == before
    assert list(file.records) == [record()["id"]]
    file.append(record("bare"))
    assert len(read_evidence(file.path)) == 2


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_at_closing_keeps_the_file(tmp_path, monkeypatch, call):
    path = write(tmp_path / "a.jsonl", record(), record("bare"))
    file = EvidenceFile.open(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, call, _full)
    with pytest.raises(RecordError, match=r"a\.jsonl: the disk is full; the file is as it was before"):
        file.compact()
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_real_full_device_is_told_as_one():
    """/dev/full refuses every write as a full disk does, without any patching."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            os.write(descriptor, b"x")
    finally:
        os.close(descriptor)
    assert "the disk is full" in str(evidence.write_error(Path("a.jsonl"), caught.value))


def test_a_folder_that_may_not_be_written(tmp_path):
    (tmp_path / "evidence").write_text("a file where a folder should be")
    with pytest.raises(RecordError, match="could not be written"):
        EvidenceFile.open(tmp_path / "evidence" / "a.jsonl")
    with pytest.raises(RecordError, match="could not be written"):
        write_atomic(tmp_path / "evidence" / "a.md", "text")


# --- merging


def _at(minute: int, **values: Any) -> Any:
    return record(recorded=f"2026-01-01T00:{minute:02}:00.000+00:00", **values)


ENTRIES = st.lists(
    st.tuples(st.sampled_from(("bare", "graphed", "native")), st.sampled_from(("f", "g")), st.integers(0, 59)),
    max_size=8,
    unique_by=lambda entry: entry[2],
).map(lambda entries: [_at(minute, arm=arm, of=family(name), seed=minute) for arm, name, minute in entries])


@given(ENTRIES, st.integers(0, 8))
def test_merging_is_commutative_idempotent_and_keeps_the_last(entries, cut):
    one, other = entries[:cut], entries[cut:]
    merged = latest([one, other])
    assert merged == latest([other, one]) == latest([merged, merged]) == latest([merged, one])
    newest = {}
    for entry in sorted(entries, key=lambda r: r["recorded"]):
        newest[entry["id"]] = entry["seed"]
    assert {r["id"]: r["seed"] for r in merged} == newest


def test_both_modes_share_a_file_and_are_told_apart(tmp_path):
    path = write(tmp_path / "a.jsonl", *small_training(), record(), trained("native", told(""), checks=one_failed("loss", "rng")))
    EvidenceFile.open(path).compact()
    back = read_evidence(path)
    assert [r["mode"] for r in back].count("inference") == 1
    assert latest([back]) == mark_healed(back)
    healed = {r["id"]: r["healed"] for r in back if r["healed"]}
    assert healed == {}, "a wrong native row heals nothing of another mode or family"
    EvidenceFile.open(write(path, trained(of=training()))).compact()
    assert [r["healed"] for r in read_evidence(path) if r["id"] == trained()["id"]] == [{"native": "rng"}]


def test_shards_merge_into_one_file_and_heal_across_them(tmp_path):
    rows = small_matrix()
    shards = [write(tmp_path / f"s{i}.jsonl", *rows[i::3]) for i in range(3)]
    merged = merge(shards, tmp_path / "all.jsonl")
    assert merged == read_evidence(tmp_path / "all.jsonl")
    assert [r["id"] for r in merged] == sorted(r["id"] for r in rows)
    assert sum(bool(r["healed"]) for r in merged) == 1
    assert merge(shards, tmp_path / "all.jsonl") == merged


def test_shards_of_one_environment_are_read_together(tmp_path):
    rows = small_matrix()
    for number in (1, 2):
        write(evidence_path(tmp_path, H200, "cuda", f"{number}/2"), *rows[number - 1 :: 2])
    write(evidence_path(tmp_path, CPU, "emulated"), record(engine="emulated"))
    found = read_all(tmp_path)
    assert {name: len(records) for name, records in found.items()} == {H200_NAME: len(rows), CPU_NAME: 1}


def test_environments_do_not_merge_and_a_bad_shard_leaves_the_target(tmp_path):
    one = write(tmp_path / "one.jsonl", record())
    other = write(tmp_path / "other.jsonl", record(engine="emulated"))
    target = write(tmp_path / "all.jsonl", record("bare"))
    before = target.read_bytes()
    with pytest.raises(RecordError, match="does not merge"):
        merge([one, other], target)
    other.write_text("{}\n")
    with pytest.raises(RecordError, match=r"other\.jsonl:1: "):
        merge([one, other], target)
    assert target.read_bytes() == before
