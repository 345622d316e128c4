"""Measurements: their file, their table, and the shapes that ``auto`` is told to leave alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from parity.record.bench import (
    EMULATED,
    Measurement,
    Spread,
    bench_path,
    bench_section,
    bench_table,
    read_bench,
    read_benches,
    with_slower,
    write_bench,
)
from parity.record.files import RecordError
from parity.rows.row import Row, Settings
from parity.runtime.allowlist import Allowlist, Certificate, Environment, Tried, is_slower

HERE = {"gpu": "NVIDIA H200", "arch": "sm90", "torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "91900"}
NAME = "nvidia-h200-sm90-torch2.11.0-cu130"


def _around(middle: float) -> Spread:
    return Spread(middle * 0.95, middle, middle * 1.05)


def _measured(
    family="fomo", *, mode="inference", arm="graphed", batch=1, eager=1200.0, time=160.0, dtype="float32", **more
) -> Measurement:
    row = Row("libreyolo", family, "point", mode, Settings(96, batch, dtype), arm)
    made = Measurement(
        row.id, "cuda", _around(eager), _around(time), _around(eager), _around(20.0), None, 35.0, 2**20, 3 * 2**19, 2**21,
        ((batch, 3, 96, 96),), dtype, 7, HERE, "1.6.0", "parity bench", "2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    return replace(made, **more)


def _listed(measured: Measurement) -> Allowlist:
    row = Row.parse(measured.row)
    environment = Environment("sm90", "2.11.0+cu130", "13.0", "91900", "1.6.0")
    tried = (Tried(96, row.settings.batch, "float32", measured.shapes),)
    return Allowlist((Certificate("libreyolo", row.family, "point", row.mode, NAME, environment, tried),), (NAME,))


# ---------------------------------------------------------------- figures
def test_what_follows_from_the_times():
    inference = _measured()
    assert (inference.speedup, inference.share, inference.ceiling) == (7.5, None, None)
    training = _measured(mode="training", eager=1000.0, network=_around(750.0))
    assert (training.share, training.ceiling) == (0.75, 4.0)
    alone = _measured(mode="training", eager=1000.0, network=_around(1100.0))
    assert (alone.share, alone.ceiling) == (1.0, math.inf)


@pytest.mark.parametrize(("eager", "time", "slower"), [(100.0, 120.0, True), (100.0, 104.0, False), (100.0, 90.0, False)])
def test_slower_is_beyond_the_spread_of_both(eager, time, slower):
    assert _measured(eager=eager, time=time).slower is slower


# ---------------------------------------------------------------- the file
def test_a_file_holds_each_row_once(tmp_path):
    path = bench_path(tmp_path, HERE, "cuda")
    assert path == tmp_path / "bench" / f"{NAME}.jsonl"
    assert read_benches(tmp_path) == {}
    first, second, again = _measured("yolox"), _measured(network=_around(3.0)), _measured("yolox", time=99.0)
    write_bench(path, [first, second])
    text = path.read_text()
    write_bench(path, [second, first])
    assert path.read_text() == text
    write_bench(path, [again])
    assert read_bench(path) == [second, again]
    assert read_benches(tmp_path) == {NAME: [second, again]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 0}, "schema 0, this version reads 1"),
        ({"extra": 1}, "lacks or has too much: extra"),
        ({"row": "x"}, "not a row id: 'x'"),
        ({"eager": [1.0]}, "not a measurement"),
        ({"shapes": 3}, "not a measurement"),
    ],
)
def test_a_line_that_is_not_ours_is_an_error(tmp_path, change, told):
    path = tmp_path / "x.jsonl"
    whole = json.dumps(_measured().to_dict())
    path.write_text(f"{whole}\n{json.dumps(_measured().to_dict() | change)}\n")
    with pytest.raises(RecordError) as caught:
        read_bench(path)
    assert f"x.jsonl:2: {told}" in str(caught.value)
    assert "measure again" in str(caught.value)
    path.write_bytes(f"{whole}\n".encode() + b"\xff\n")
    with pytest.raises(RecordError, match=r"x\.jsonl:2: .*take the line out"):
        read_bench(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_bench(tmp_path)
    path.write_text(f"{whole}\nnot json\n")
    with pytest.raises(RecordError, match=r"x\.jsonl:2: "):
        write_bench(path, [_measured("yolox")])
    assert path.read_text().startswith(whole)  # nothing was lost


# ---------------------------------------------------------------- what "auto" is told
def test_certificates_learn_what_is_slower():
    slow, fast = _measured(eager=100.0, time=130.0, batch=8), _measured()
    (made,) = with_slower(_listed(slow), {NAME: [slow, fast]}).certificates
    assert made.slower == (Tried(96, 8, "float32", ((8, 3, 96, 96),)),)
    assert is_slower(made, made.environment, [(8, 3, 96, 96)], "float32")
    assert not is_slower(made, made.environment, [(1, 3, 96, 96)], "float32")


@pytest.mark.parametrize(
    "other",
    [
        _measured(eager=100.0, time=104.0),
        _measured(eager=100.0, time=130.0, arm="native"),
        _measured(eager=100.0, time=130.0, engine="emulated"),
        _measured("yolox", eager=100.0, time=130.0),
        _measured(eager=100.0, time=130.0, mode="training"),
        replace(_measured(eager=100.0, time=130.0, dtype="autocast_bfloat16"), dtype="float32"),
        _measured(eager=100.0, time=130.0, zoo_version="1.7.0"),
        _measured(eager=100.0, time=130.0, environment=HERE | {"cudnn": "90000"}),
    ],
    ids=["within the spread", "native", "emulated", "another family", "training", "autocast", "another version", "another cuDNN"],
)
def test_what_teaches_them_nothing(other):
    listed = _listed(_measured())
    assert with_slower(listed, {NAME: [other]}) == listed
    assert with_slower(listed, {"elsewhere": [_measured(eager=100.0, time=130.0)]}) == listed


def test_an_earlier_measurement_is_forgotten():
    slow = _measured(eager=100.0, time=130.0)
    taught = with_slower(_listed(slow), {NAME: [slow]})
    assert taught.certificates[0].slower
    assert with_slower(taught, {NAME: [_measured()]}) == _listed(slow)


# ---------------------------------------------------------------- the table
def test_the_table():
    training = _measured("mobilenetv4", mode="training", eager=15500.0, time=3950.0, batch=16, network=_around(12400.0))
    slow = _measured("yolox", eager=100.0, time=130.0)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in bench_table([training, slow, _measured()]).splitlines()]
    assert lines[0][:6] == ["row", "mode", "arm", "eager ms", "arm ms", "speed-up"]
    assert lines[2] == [
        "`fomo/point/96px-b1-float32`", "inference", "graphed", "1.20 (1.14 to 1.26)", "0.160 (0.152 to 0.168)", "7.50x",
        "1.20 (1.14 to 1.26)", "0.020 (0.019 to 0.021)", "35", "1", "+50%", "", "",
    ]  # fmt: skip
    assert lines[3][5] == "0.77x (slower)"
    assert lines[4][0] == "`mobilenetv4/point/96px-b16-float32`"
    assert lines[4][-2:] == ["80%", "5.00x"]
    assert bench_table([]) == ""


def test_the_section_says_what_an_emulated_device_is_worth():
    emulated = _measured(engine="emulated")
    text = bench_section({"emulated-cpu-torch2": [emulated], NAME: [_measured()]})
    assert text.index(f"**{NAME}**") < text.index("**emulated-cpu-torch2**") < text.index(EMULATED)
    assert EMULATED not in bench_section({NAME: [_measured()]})
    assert bench_section({}) == bench_section({NAME: []}) == ""
