"""What enters the allowlist, what does not, and that the file reads back as it was written, on any order of the evidence."""

from __future__ import annotations

import errno
import os
import random

import pytest

from parity.judge.outcome import Check
from parity.record.allowlist import build_allowlist, render_allowlist, write_allowlist
from parity.record.files import RecordError
from parity.runtime.allowlist import Allowlist, Environment, Tried

from .records import (
    H200,
    H200_NAME,
    YOLO9,
    failing,
    family,
    one_failed,
    passing,
    record,
    small_matrix,
    small_training,
    told,
    trained,
    training,
)  # fmt: skip


def _keys(records):
    return [c.id for c in build_allowlist(records).certificates]


def test_only_certified_graphed_rows_on_a_device():
    assert _keys(small_matrix()) == [
        "libreyolo/clip/classify/inference",
        "libreyolo/yolo9/detect/inference",
        "libreyolo/yolox/detect/inference",
    ]
    assert _keys([record("bare"), record("native")]) == []
    assert _keys([record(engine="emulated")]) == []
    assert _keys([record(of=family(zoo="controls"))]) == []
    assert _keys([record(boundary="whole")]) == []
    assert _keys([record(captures=0)]) == []


def test_a_size_that_is_wrong_takes_its_family_out_and_one_that_did_not_fit_does_not():
    assert _keys([record(), record(size=128, checks=failing("churn", "stale-address"))]) == []
    assert _keys([record(), record(size=128, status="out_of_memory")]) == [record()["id"].rpartition("/64px")[0]]


def test_a_certificate_holds_what_the_runtime_needs():
    figures = {"kernels": {"gemm": 2}, "boundary": "forward_enc", "derived_reads": True, "unseen": ["aten::cudnn"]}
    (found,) = build_allowlist([record(checks=passing(**figures)), record(size=128)]).certificates
    assert found.environment == Environment("sm90", "2.11.0+cu130", "13.0", "91900", "1.6.0")
    assert (found.measured_on, found.boundary, found.derived_reads, found.unseen) == (
        H200_NAME, "forward_enc", True, ("aten::cudnn",),
    )  # fmt: skip
    assert [(t.size, t.batch) for t in found.tried] == [(64, 1), (64, 2), (96, 1), (128, 1), (128, 2)]
    assert found.tried[1] == Tried(64, 2, "float32", ((2, 3, 64, 64),))
    assert len(found.kernels) == 16
    (other,) = build_allowlist([record(checks=passing(kernels={"gemm": 3}))]).certificates
    assert other.kernels not in ("", found.kernels)


def test_rows_of_an_older_zoo_do_not_lend_their_sizes():
    old = record(size=128, zoo_version="1.5.0", recorded="2025-01-01T00:00:00.000+00:00")
    (found,) = build_allowlist([old, record()]).certificates
    assert found.environment.zoo == "1.6.0"
    assert [t.size for t in found.tried] == [64, 64, 96]


def test_environments_each_have_their_certificate():
    b200 = H200 | {"gpu": "NVIDIA B200", "arch": "sm100"}
    found = build_allowlist([record(), record(environment=b200), record(engine="emulated")])
    assert found.environments == ("nvidia-b200-sm100-torch2.11.0-cu130", H200_NAME)
    assert [c.environment.arch for c in found.certificates] == ["sm100", "sm90"]
    wanted = found.certificates[1]
    assert found.find("libreyolo", "yolox", "detect", environment=wanted.environment) == wanted


def test_the_text_is_the_same_in_any_order_and_reads_back(tmp_path):
    records = [*small_matrix(), *small_training()]
    text = render_allowlist(build_allowlist(records))
    for seed in range(5):
        random.Random(seed).shuffle(records)
        assert render_allowlist(build_allowlist(records)) == text
    assert "2026" not in text, "no times"
    path = tmp_path / "reports" / "list.json"
    write_allowlist(build_allowlist(records), path)
    assert path.read_text() == text
    assert Allowlist.load(path) == build_allowlist(records)
    write_allowlist(Allowlist(), path)
    assert Allowlist.load(path) == Allowlist()


def test_a_full_disk_keeps_the_old_allowlist(tmp_path, monkeypatch):
    path = tmp_path / "list.json"
    write_allowlist(build_allowlist(small_matrix()), path)
    before = path.read_text()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match=r"list\.json: the disk is full"):
        write_allowlist(Allowlist(), path)
    monkeypatch.undo()
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["list.json"]


def test_a_skipped_interleave_certifies_its_own_shape_only():
    checks = [Check("capture", "passed"), Check("replay", "passed"), Check("interleave", "skipped", "no other size")]
    (found,) = build_allowlist([record(checks=checks, of=YOLO9)]).certificates
    assert [(t.size, t.batch) for t in found.tried] == [(64, 1)]


# --- training

NOISE = told("eager_noise", "cudnn-deterministic", cause="nondeterministic-kernel")
UNPROVEN = {"says": told(""), "checks": one_failed("proof", "unknown")}


def test_only_certified_graphed_rows_of_training_on_a_device():
    assert _keys(small_training()) == [
        f"libreyolo/{name}/training" for name in ("dfine/detect", "ec/detect", "resnet/classify", "rtmdet/detect")
    ]
    assert _keys([trained("native")]) == _keys([trained("bare")]) == []
    assert _keys([trained(engine="emulated")]) == []
    assert _keys([trained(of=training(zoo="controls"))]) == []
    assert _keys([trained(captures=0)]) == _keys([trained(replays=0)]) == []
    assert _keys([trained(**UNPROVEN)]) == []
    assert _keys([trained(says=told("own_rng", cause="rng"))]) == [], "nothing proves it"
    assert _keys([trained(says=told("own_rng", "draws-fixed", cause="rng"))]) == [], "what proves it changes its numbers"


def test_a_certificate_of_training_says_class_and_proof_of_each_setting():
    (found,) = build_allowlist([trained(), trained(says=NOISE, dtype="float32"), trained(dtype="bfloat16", **UNPROVEN)]).certificates
    assert found.grade == "eager_noise"
    assert found.proof == ("64px-b2-float16: exact", "64px-b2-float32: eager_noise, proved by cudnn-deterministic")
    assert [t.dtype for t in found.tried] == ["float16", "float32"]
    assert found.tried[0].shapes == ((2, 3, 64, 64), (2, 5, 5))
    assert found.boundary == "the whole network"
    assert [row.split("/")[4] for row in found.rows] == ["64px-b2-float16", "64px-b2-float32"]
    entry = found.to_dict()
    assert (entry["mode"], entry["class"], tuple(entry["proof"])) == ("training", "eager_noise", found.proof)


def test_a_certificate_of_inference_has_neither():
    (found,) = build_allowlist([record()]).certificates
    assert not {"class", "proof", "grade"} & set(found.to_dict())


def test_a_wrong_setting_takes_the_family_out_and_an_unproven_one_itself():
    key = ["libreyolo/yolox/detect/training"]
    assert _keys([trained(), trained(dtype="float32", **UNPROVEN)]) == key
    for check in ("gradients", "accumulation", "trajectory"):
        assert _keys([trained(), trained(says=told(""), dtype="float32", checks=one_failed(check, "buffer-drift"))]) == []
    assert _keys([trained(), trained(dtype="float32", status="crashed")]) == key


def test_the_modes_of_a_family_do_not_answer_for_each_other():
    wrong = trained(says=told(""), checks=one_failed("gradients", "buffer-drift"))
    assert _keys([record(), wrong]) == ["libreyolo/yolox/detect/inference"]
    assert _keys([record(checks=failing("replay", "rng")), trained()]) == ["libreyolo/yolox/detect/training"]
    assert len(_keys([record(), trained()])) == 2
