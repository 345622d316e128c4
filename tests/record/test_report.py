"""The matrix of a small run, word by word; what a summary tells; and the files that `write_reports` leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.judge.outcome import CAUSES, CLASSES
from parity.record.advice import ADVICE
from parity.record.allowlist import build_allowlist
from parity.record.bench import Measurement, Spread, bench_path, bench_section, write_bench
from parity.record.evidence import evidence_path
from parity.record.files import RecordError
from parity.record.line import mark_healed
from parity.record.markdown import code, table
from parity.record.numerics import INTRODUCTION, classes_table, training_table, tried_table
from parity.record.report import MATRIX, support_matrix, write_reports, write_summary
from parity.runtime.allowlist import FILE, Allowlist

from .records import (
    CPU,
    CPU_NAME,
    H200,
    H200_NAME,
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

GOLDEN = Path(__file__).with_name("golden_matrix.md")


def emulated():
    stale = failing("churn", "stale-address", "nn.py:201 x")
    return mark_healed([record("bare", stale, of=YOLO9, engine="emulated"), record(of=YOLO9, engine="emulated")])


def test_the_matrix_word_by_word():
    controls = [record("graphed", of=family("counter", "control", zoo="controls")), trained("bare", of=training(zoo="controls"))]
    real = [*mark_healed([*small_matrix(), *small_training()]), *controls]
    text = support_matrix({H200_NAME: real, CPU_NAME: [*emulated(), trained(engine="emulated")]})
    assert text == GOLDEN.read_text()


def _section(text: str, start: str, end: str = "\n## ") -> str:
    return text.partition(start)[2].partition(end)[0]


def test_emulated_evidence_is_marked_and_certifies_nothing():
    text = support_matrix({CPU_NAME: emulated()})
    assert "Nothing is certified" in _section(text, "## Certified")
    assert "screened" in _section(text, "## Emulated: screened, not certified")
    assert "**Emulated: screened, not certified.**" in write_summary(emulated())
    assert "Emulated" not in write_summary(small_matrix())


def test_tasks_stand_in_the_order_of_the_mission():
    named = {"x": "zoom", "a": "pose", "b": "detect", "c": "segment", "d": "detect"}
    text = support_matrix({H200_NAME: [record(of=family(name, task)) for name, task in named.items()]})
    lines = [line for line in _section(text, "## Certified").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[1:] == [["detect", "b, d"], ["segment", "c"], ["pose", "a"], ["zoom", "x"]]


def test_a_family_certified_on_some_environments_only_says_where():
    b200 = H200 | {"gpu": "NVIDIA B200", "arch": "sm100"}
    name = "nvidia-b200-sm100-torch2.11.0-cu130"
    both = {H200_NAME: [record()], name: [record(environment=b200), record(of=family("z"), environment=b200)]}
    assert f"yolox, z (only {name})" in support_matrix(both)


def _left_out(text: str) -> list[tuple[str, ...]]:
    return [tuple(row.values()) for row in _rows(_section(text, "**Not certified**", "\n## "))]


def test_what_was_judged_and_is_not_allowed_is_named_at_the_top():
    refused, two = failing("capture", "h2d-copy"), family("two")
    records = [
        record(),
        record("native", failing("replay", "rng")),  # the allowlist follows the graphed arm
        record(of=family("refused"), checks=refused),
        record(of=two), record(of=two, size=128, checks=failing("replay", "rng")),
        record(of=family("died"), status="crashed"),
        record(of=family("gone"), status="unavailable"), record(of=family("slow"), status="timed_out"),
        record(of=family("counter", zoo="controls"), checks=refused),
        trained(checks=one_failed("proof", "unknown")),
        trained(says=told("own_rng", "draws-fixed", cause="rng"), of=training("draws"), dtype="float32"),
    ]  # fmt: skip
    text = support_matrix({H200_NAME: records})
    expected = [
        ("libreyolo", "inference", "detect", "died", "crashed (unknown)"),
        ("libreyolo", "inference", "detect", "refused", "uncapturable (h2d-copy)"),
        ("libreyolo", "inference", "detect", "two", "wrong (rng)"),
        ("libreyolo", "training", "detect", "draws (fp32)", "certified (own_rng)"),
        ("libreyolo", "training", "detect", "yolox (fp16)", "unproven (unknown)"),
    ]
    assert _left_out(text) == expected
    assert text.index("**Not certified**") < text.index(f"## {H200_NAME}")
    listed = build_allowlist(records).certificates
    assert not {row[3].partition(" ")[0] for row in _left_out(text) if row[1] == "inference"} & {
        c.family for c in listed if c.mode == "inference"
    }
    b200 = [record(of=family("refused"), checks=refused, environment=H200 | {"gpu": "NVIDIA B200", "arch": "sm100"})]
    assert _left_out(support_matrix({H200_NAME: [record()], "b200": b200})) == [(*expected[1], "b200")]
    assert "**Not certified**" not in support_matrix({H200_NAME: [record()]})


def test_an_unexpected_verdict_stands_out():
    entry = record("native", failing("replay", "rng"))
    assert "**wrong**, declared certified" in support_matrix({H200_NAME: [entry]})
    summary = write_summary([entry, record()])
    assert "2 rows, 1 not as declared." in summary
    assert f"`{entry['id']}`" in _section(summary, "1 not as declared.", "**libreyolo**")
    assert "0 not as declared" in write_summary(small_matrix())
    assert write_summary([]) == "No row has evidence.\n"


# --- training


def test_the_classes_are_introduced_once_in_two_sentences_and_only_where_there_is_training():
    both = {H200_NAME: small_training(), CPU_NAME: [trained(engine="emulated")]}
    assert [text.count(INTRODUCTION) for text in (support_matrix(both), write_summary(small_training()))] == [1, 1]
    assert INTRODUCTION not in support_matrix({H200_NAME: small_matrix()}) + write_summary(small_matrix())
    assert INTRODUCTION.count(". ") == 1
    assert all(f"`{name}`" in INTRODUCTION for name in CLASSES)


def _rows(text: str) -> list[dict[str, str]]:
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def _of(subjects) -> list[dict[str, str]]:
    return _rows(training_table([{entry["arm"]: entry for entry in arms} for arms in subjects], {}))


def test_a_line_has_both_arms_with_class_count_cause_and_proof():
    noise = told("eager_noise", "a", "b", cause="nondeterministic-kernel", tensors=(31, 369), ops=["grid_sampler_2d_backward"])
    rounded = told("one_ulp", "incoming-layout", cause="grad-layout", tensors=(1, 240))
    (line,) = _of([[trained(says=noise, peak_memory=1 << 30), trained("native", rounded)]])
    assert line == {
        "family": "yolox", "task": "detect", "setting": "fp16", "peak memory": "1024 MiB", "captured": "the whole network",
        "graphed": "certified (eager_noise)", "graphed: gradients differing": "31/369",
        "graphed: cause": "nondeterministic-kernel: grid_sampler_2d_backward", "graphed: proved by": "a, b",
        "native": "certified (one_ulp)", "native: gradients differing": "1/240", "native: cause": "grad-layout",
        "native: proved by": "incoming-layout",
    }  # fmt: skip


def test_an_op_is_named_once_with_its_first_place_and_many_are_cut_short():
    noise = "nondeterministic-kernel"
    places = [f"grid_sample in layers.{i} at zoo/deform.py:180 value = F.grid_sample(" for i in range(9)]
    (line,) = _of([[trained(says=told("eager_noise", "a", cause=noise, ops=[*places, "index_add at zoo/nn.py:3 x.index_add("]))]])
    assert line["graphed: cause"] == (
        f"{noise}: grid_sample in layers.0 at zoo/deform.py:180 and 8 more places; index_add at zoo/nn.py:3"
    )
    (line,) = _of([[trained(says=told("eager_noise", "a", cause=noise, ops=list("vwxyz")))]])
    assert line["graphed: cause"] == f"{noise}: v; w; x; 2 more operations"


def test_ops_are_told_of_noise_alone():
    wrong = trained(checks=one_failed("trajectory", "stale-constant"), says=told("", cause="nondeterministic-kernel", ops=["gather"]))
    (line,) = _of([[wrong]])
    assert line["graphed: cause"] == "stale-constant"


def test_a_proof_that_was_not_minimised_says_so():
    (line,) = _of(
        [[trained(says=told("eager_noise", "a", "b", minimal=False)), trained("native", told("eager_noise", "a", minimal=True))]]
    )
    assert (line["graphed: proved by"], line["native: proved by"]) == ("a, b (fewer may do)", "a")


def test_an_arm_that_nobody_ran_has_no_column_and_one_that_one_row_lacks_is_blank():
    first, second = _of([[trained()], [trained(dtype="float32"), trained("native", dtype="float32")]])
    assert (first["native"], second["native"]) == ("", "certified (exact)")
    assert not [name for name in first if name.startswith("bare")]


@pytest.mark.parametrize("status", ["crashed", "timed_out", "out_of_memory", "unavailable"])
def test_a_row_that_was_not_judged_has_a_line_too(status):
    (line,) = _of([[trained(status=status, peak_memory=0, message="gone")]])
    assert line["graphed"] == ("unavailable" if status == "unavailable" else f"**{status}**, declared certified")
    assert [line[f"graphed: {name}"] for name in ("gradients differing", "proved by")] == ["", ""]
    assert (line["peak memory"], line["captured"]) == ("", "")


def test_settings_stand_in_the_order_of_training():
    text = support_matrix({H200_NAME: [trained(dtype=dtype) for dtype in ("bfloat16", "float32", "float16")]})
    rows = _rows(_section(text, "| family ", "\n\n").join(("| family ", "")))
    assert [row["setting"] for row in rows] == ["fp16", "bf16", "fp32"]


def test_classes_by_families_the_strongest_first():
    lines = _rows(classes_table(small_training()))
    assert [(line["class"], line["proved by"]) for line in lines] == [
        ("exact", "no condition"), ("eager_noise", "deterministic-algorithms, substitutes"),
    ]  # fmt: skip
    assert lines[0]["families"] == "ec (fp16, bf16), resnet (fp16, bf16, fp32), rtmdet (fp16)"
    assert classes_table([trained("native"), trained(checks=one_failed("loss", "rng"), says=told(""))]) == ""


def test_dtypes_that_are_not_certified_are_told():
    text = support_matrix({H200_NAME: small_training()})
    assert "dfine, ec (fp16, bf16), rtmdet " in _section(text, "## Certified")
    assert "training: 4 families, 4 with their tasks" in text


def test_a_dtype_that_is_certified_in_two_sizes_is_told_once():
    ec = training("ec")
    records = [trained(of=of, dtype=dtype) for of in (training("ec", size=128), ec) for dtype in ("bfloat16", "float16")]
    says = told("", cause="", tensors=(4, 460), tried=[])
    text = support_matrix({H200_NAME: [*records, trained(of=ec, says=says, dtype="float32", checks=one_failed("proof", "unknown"))]})
    assert "ec (fp16, bf16) " in _section(text, "## Certified")


def _measured(entry, eager: float, graphed: float) -> Measurement:
    one, other, host = (Spread(value, value, value) for value in (eager, graphed, 5.0))
    numbers = {"capture": 40.0, "memory_eager": 1 << 20, "memory": 1 << 21, "memory_capture": 1 << 21}
    shapes, dtype = ((2, 3, 64, 64), (2, 5, 5)), entry["settings"].split("-")[-1]
    facts = {"environment": H200, "zoo_version": "1.6.0", "command": "parity bench", "recorded": "2026-01-01T00:00:00+00:00"}
    return Measurement(entry["id"], "cuda", one, other, host, host, one, shapes=shapes, dtype=dtype, repeat=3, **numbers, **facts)


def test_what_was_measured_stands_beside_its_row_and_in_a_section_of_its_own():
    entries = [trained(), trained("native"), trained(dtype="float32")]
    benches = {H200_NAME: [_measured(entries[0], 300.0, 120.0), _measured(entries[1], 300.0, 200.0)]}
    text = support_matrix({H200_NAME: entries}, benches)
    rows = _rows(_section(text, "| family ", "\n\n").join(("| family ", "")))
    assert [(row["graphed: speed-up"], row["native: speed-up"]) for row in rows] == [("2.50x", "1.50x"), ("", "")]
    assert bench_section(benches) in _section(text, "## Speed")
    plain = support_matrix({H200_NAME: entries})
    assert "speed-up" not in plain
    assert "## Speed" not in plain


def test_reports_take_in_what_was_measured(tmp_path):
    entry = trained()
    write(evidence_path(tmp_path, H200, "cuda"), entry)
    write_bench(bench_path(tmp_path, H200, "cuda"), [_measured(entry, 100.0, 120.0)])
    allowlist, matrix = write_reports(tmp_path)
    (certificate,) = Allowlist.load(allowlist).certificates
    assert [(t.dtype, t.shapes) for t in certificate.slower] == [("float16", ((2, 3, 64, 64), (2, 5, 5)))]
    assert "0.83x" in matrix.read_text()


def test_what_was_tried_of_an_unproven_row():
    tried = [{"conditions": [], "differing": 4}, {"conditions": ["a", "b"], "differing": 3}, {"conditions": ["c"], "differing": -1}]
    entry = trained(says=told("", tried=tried), checks=one_failed("proof", "unknown"))
    (line,) = _rows(tried_table([entry, trained()]))
    assert line == {"row": f"`{entry['id']}`", "conditions: tensors still differing": "none: 4; a + b: 3; c: some"}
    assert "**Unproven**" in support_matrix({H200_NAME: [entry]})
    assert "**Unproven**" not in support_matrix({H200_NAME: [trained()]})


def test_a_summary_counts_classes_apart():
    lines = {row["verdict"]: row["rows"] for row in _rows(_section(write_summary(small_training()), "## CUDA-graph parity", "\n\n11"))}
    assert lines == {
        "certified (exact)": "6", "certified (eager_noise)": "3", "certified (float_rounding)": "1", "unproven": "1",
    }  # fmt: skip


def test_training_on_the_emulated_engine_is_reproduced_by_asking_for_it():
    asked = "parity certify --zoo libreyolo --mode training --engine emulated"
    assert asked in support_matrix({CPU_NAME: [trained(engine="emulated")]})
    assert asked not in support_matrix({CPU_NAME: emulated()})
    assert "--mode" not in _section(support_matrix({H200_NAME: [trained()]}), "```sh", "```")


def test_vacuous_rows_and_leaves():
    vacuous = record("bare", failing("input_dependence", "dead-input"), dead_leaves=("logits",))
    text = support_matrix({H200_NAME: [vacuous]})
    assert "**Vacuous**: no output depends on the input" in text
    assert "**Vacuous leaves**" not in text
    assert "scale (1 of 2)" in support_matrix({H200_NAME: small_matrix()})


def test_every_cause_has_its_advice():
    assert set(ADVICE) == set(CAUSES)


def test_what_is_healed_is_not_among_the_refused():
    text = support_matrix({H200_NAME: mark_healed(small_matrix())})
    assert "yolo9" in _section(text, "**Healed**", "**Refused**")
    assert "yolo9" not in _section(text, "**Refused**", "**Vacuous")
    assert "bare, graphed, native" in _section(text, "**Refused**", "**Vacuous"), "arms that agree are told once"


@given(st.text(), st.text())
def test_a_cell_never_breaks_its_table(one, other):
    lines = table([{"a": one, "b": code(other)}, {"a": "x", "b": "y"}]).split("\n")
    assert len(lines) == 4
    for line in lines:
        assert line.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize(("text", "marked"), [("a", "`a`"), ("a`b", "`` a`b ``"), ("``", "``` `` ```"), ("", ""), ("a|b", "`a|b`")])
def test_code(text, marked):
    assert code(text) == marked


def _reports(folder: Path) -> Path:
    write(evidence_path(folder, H200, "cuda"), *small_matrix())
    write(evidence_path(folder, CPU, "emulated"), *emulated())
    return folder


def test_reports_are_rebuilt_from_files_alone_and_are_the_same_each_time(tmp_path):
    paths = write_reports(_reports(tmp_path))
    assert [path.name for path in paths] == [FILE, MATRIX]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_reports(tmp_path)] == first
    assert len(Allowlist.load(paths[0]).certificates) == 3
    assert "**Healed**" in paths[1].read_text(), "healed is drawn even if the run was killed before it closed its file"


def test_bad_evidence_or_a_full_disk_keeps_the_old_reports(tmp_path, monkeypatch):
    paths = write_reports(_reports(tmp_path))
    before = [path.read_bytes() for path in paths]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(RecordError, match="the disk is full"):
            write_reports(tmp_path)
    evidence = evidence_path(tmp_path, H200, "cuda")
    with evidence.open("a") as file:
        file.write("{}\n")
    with pytest.raises(RecordError, match=r"\.jsonl:12: "):
        write_reports(tmp_path)
    assert [path.read_bytes() for path in paths] == before
