"""The bench: what a child measures, which rows are measured, and that only one bench does so at a time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

from parity import bench as door
from parity.bench import Unmeasured, bench_rows, command_of, line, measured
from parity.judge.contest import Contest
from parity.record.bench import EMULATED, Measurement, measurement_of, read_bench
from parity.rows.discovery import Catalogue, DiscoveryError, Selection, discover
from parity.rows.family import Family, Input, Subject, Zoo
from parity.rows.row import Row, Settings
from parity.rows.training import Training, TrainSubject
from parity.run import bench
from parity.run.alone import REPEAT, alone
from parity.run.isolate import probe
from parity.run.nursery import RunError
from parity.runtime.emulated import device

FAMILIES = Path(__file__).parents[2] / "families"


class Net(nn.Module):
    """Refuses to be captured where ``asks``: it asks the device for a number."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.asks, self.layer = asks, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * 2 if self.asks and y.sum().item() > 1e9 else y


def _build(asks: bool):
    def build(settings: Settings) -> Subject:
        module = Net(asks).eval()
        return Subject(module, module)

    return build


def _train(asks: bool):
    def build(settings: Settings) -> TrainSubject:
        module = Net(asks).train()

        def loss(forward, x: Tensor) -> Tensor:
            time.sleep(0.01)  # the eager remainder of a step
            return forward(x).float().square().mean()

        return TrainSubject(module, module, loss)

    return build


def _inputs(size: int, batch: int):
    return (Input((batch, 4)),)


def _draw(settings: Settings, probe: str, seed: int):
    return (torch.randn(settings.batch, 4, generator=torch.Generator().manual_seed(seed)),)


FAMILY = (
    *(
        Family("small", name, "detect", _build(name == "asks"), _inputs, sizes=(8, 16), arms=("bare", "graphed"))
        for name in ("net", "asks")
    ),
    *(Training("small", name, "detect", _train(name == "asks"), _draw, size=8, arms=("graphed",)) for name in ("net", "asks")),
)
ZOO = Zoo("small", "torch", "pip install torch", FAMILY, lambda: None, lambda: "1.0")
CATALOGUE = Catalogue((ZOO,), ())


def _row(name: str = "net", mode: str = "inference", dtype: str = "float32", arm: str = "graphed", batch: int = 2) -> Row:
    return Row("small", name, "detect", mode, Settings(8, batch, dtype), arm)


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setenv(REPEAT, "3")
    monkeypatch.setattr(bench, "BLOCK", 0.002)


def _measurement(row: Row) -> Measurement:
    outcome = bench.measure(row, CATALOGUE, "emulated")
    (check,) = outcome.checks
    assert (outcome.status, check.status) == ("judged", "passed"), outcome
    return measurement_of(row, "emulated", check.figures, environment={"torch": "2"})


# ---------------------------------------------------------------- the child
@pytest.mark.parametrize(("dtype", "own"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("autocast_bfloat16", "float32")])
@pytest.mark.parametrize("arm", ["graphed", "bare"])
def test_an_inference_row(arm, dtype, own):
    found = _measurement(_row(arm=arm, dtype=dtype))
    for spread in (found.eager, found.time, found.host_eager, found.host):
        assert 0 < spread.low <= spread.middle <= spread.high
    assert (found.network, found.share, found.ceiling) == (None, None, None)
    assert (found.shapes, found.dtype, found.repeat) == (((2, 4),), own, 3)
    assert found.capture > 0
    assert 0 < found.memory_eager <= found.memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_training_row_tells_the_networks_share(dtype):
    found = _measurement(_row(mode="training", dtype=dtype))
    assert found.shapes == ((2, 4),)
    assert found.dtype == dtype
    assert found.share is not None
    assert found.share < 0.9  # ten milliseconds of each step are the loss
    assert found.ceiling == pytest.approx(1 / (1 - found.share))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_row_that_is_not_captured_has_no_figures(mode):
    outcome = bench.measure(_row("asks", mode), CATALOGUE, "emulated")
    (check,) = outcome.checks
    assert (outcome.status, check.status, check.cause) == ("judged", "failed", "host-sync")
    assert check.figures == {}
    assert "test_bench.py" in check.where


def test_a_broken_row_says_so():
    def build(settings: Settings) -> Subject:
        raise ValueError("no such variant")

    broken = Family("small", "net", "detect", build, _inputs)
    outcome = bench.measure(_row(), Catalogue((Zoo("small", "torch", "", (broken,), lambda: None, lambda: ""),), ()), "emulated")
    assert (outcome.status, outcome.checks) == ("broken", ())
    assert "no such variant" in outcome.message


class Clock:
    """In the place of bench's `time`: it moves by what is slept alone, whatever else the machine does."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(bench, "time", made)
    return made


def test_times_are_taken_in_turns(clock):
    order: list[str] = []

    def sleeper(name: str, seconds: float):
        return lambda: (order.append(name), clock.sleep(seconds))

    with device():
        slow, fast = bench.in_turns([sleeper("s", 0.004), sleeper("f", 0.001)], 4)
    assert "".join(order)[8:] == "sff" * 4  # after two calls each, twice, that tell how many make a sample
    assert slow == pytest.approx([4000] * 4)
    assert fast == pytest.approx([1000] * 4)


def test_figures_are_of_calls_and_not_of_captures(clock):
    calls = {"arm": 0}

    def arm() -> None:
        calls["arm"] += 1
        clock.sleep(0.1 if calls["arm"] == 2 else 0.001)  # as where the second call captures

    with device():
        found = bench.figures_of(Contest(lambda: clock.sleep(0.004), arm, lambda: None, None, ((1,),), "float32"), 3)
    assert found["capture"] == pytest.approx(100, rel=0.1)
    for key, each in (("time", 1000), ("eager", 4000), ("host", 1000), ("host_eager", 4000)):
        assert found[key] == pytest.approx([each] * 3)


def test_an_arm_that_falls_back_midway_is_not_measured():
    checks = iter([None, RuntimeError("it went on eagerly")])

    def check() -> None:
        if (error := next(checks)) is not None:
            raise error

    with device(), pytest.raises(RuntimeError, match="went on eagerly"):
        bench.figures_of(Contest(lambda: None, lambda: None, check, None, (), "float32"), 1)


def test_quartiles():
    assert bench.quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == [2.0, 3.0, 4.0]
    assert bench.quartiles([7.0]) == [7.0, 7.0, 7.0]


# ---------------------------------------------------------------- the parent
def test_one_bench_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(REPEAT)
    with alone(5):
        assert os.environ[REPEAT] == "5"
        with pytest.raises(RunError, match="another `parity bench` runs"), alone(5):
            pass
    assert REPEAT not in os.environ
    with alone(1):  # the lock is free again
        pass
    with pytest.raises(ValueError, match="repeat=0"), alone(0):
        pass


def test_which_rows_are_measured():
    def settings(*more, size="native", arms=("graphed",), modes=("inference",)):
        return [str(r.settings) for r in bench_rows(CATALOGUE, Selection((), ("net",), (), modes, arms, size, ""), *more)]

    assert settings() == ["16px-b1-float32"]
    assert settings((2, 8)) == ["16px-b2-float32", "16px-b8-float32"]
    assert settings((), ("bfloat16", "autocast-float16")) == ["16px-b1-bfloat16", "16px-b1-autocast_float16"]
    assert settings(size="640") == ["640px-b1-float32"]
    assert settings(size="all") == ["8px-b1-float32", "16px-b1-float32"]
    assert settings(modes=("training",)) == ["8px-b2-bfloat16"]
    assert settings((16,), ("float32", "autocast-float32", "float16")[::2], modes=("training",)) == [
        "8px-b16-float32",
        "8px-b16-float16",
    ]
    with pytest.raises(ValueError, match="precision='int8' is none of float32, bfloat16"):
        settings((), ("int8",))
    with pytest.raises(ValueError, match="batch=0"):
        settings((0,))
    with pytest.raises(DiscoveryError, match="no family is called 'nte'; near: net"):
        bench_rows(CATALOGUE, Selection((), ("nte",), size="native"))


def test_controls_are_measured_only_when_named():
    catalogue = discover([FAMILIES])
    assert "controls" not in {r.zoo for r in bench_rows(catalogue, Selection(arms=("graphed",), size="native", boundary=""))}
    assert bench_rows(catalogue, Selection(("controls",), ("plain",), arms=("graphed",), size="native"))


def test_the_command_measures_the_row_alone():
    assert command_of(_row(dtype="autocast_bfloat16"), "cuda", 9) == (
        "parity bench --zoo small --family net --task detect --mode inference --arm graphed --size 8 --batch 2 "
        "--precision autocast-bfloat16 --repeat 9 --engine cuda"
    )


def test_a_run_in_children(tmp_path, monkeypatch):
    """One row that is measured, one that is not captured."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    catalogue = discover([FAMILIES])
    rows = bench_rows(catalogue, Selection(("controls",), ("plain", "builds_a_literal"), arms=("graphed",), size="native"))
    found = {
        Row.parse(f.row).family: f for f in measured(catalogue, rows, probe(catalogue.sources, "emulated", ["controls"]), repeat=2)
    }
    one, other = found["plain"], found["builds_a_literal"]
    assert isinstance(one, Measurement)
    assert one.repeat == 2
    assert one.environment["torch"] == torch.__version__
    assert "plain/healthy/inference" in line(one)
    assert isinstance(other, Unmeasured)
    assert (other.status, other.cause) == ("judged", "h2d-copy")
    assert "not captured (h2d-copy)" in line(other)


# ---------------------------------------------------------------- the command
def _command(monkeypatch, found, engine="cuda"):
    app = typer.Typer()
    app.command()(door.bench)
    facts = {
        "engine": engine,
        "devices": ["0"],
        "environment": {"torch": "2.11.0", "gpu": "H200", "arch": "sm90", "cuda": "13.0", "zoos": {}},
    }
    monkeypatch.setattr(door, "probe", lambda sources, wanted, zoos: facts)
    monkeypatch.setattr(door, "measured", lambda *args, **more: iter(found))
    return lambda *words: CliRunner().invoke(app, ["--zoo", "controls", "--family", "plain", "--families", str(FAMILIES), *words])


def _found(engine="cuda"):
    spread = [1.0, 2.0, 3.0]
    figures = dict.fromkeys(("eager", "time", "host_eager", "host"), spread) | {"network": None, "shapes": [[2, 4]], "dtype": "float32"}
    figures |= {"capture": 1.0, "memory_eager": 1, "memory": 1, "memory_capture": 1, "repeat": 3}
    return measurement_of(_row(), engine, figures, environment={})


def test_the_command_records_what_a_device_gave(tmp_path, monkeypatch):
    rebuilt = []
    monkeypatch.setattr(door, "write_reports", rebuilt.append)
    refused = Unmeasured(_row("asks").id, "judged", "host-sync", "asks the device for a number")
    run = _command(monkeypatch, [_found(), refused])
    done = run("--reports", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    assert [entry["row"] for entry in json.loads(done.stdout)] == [_row().id, _row("asks").id]
    assert [m.row for m in read_bench(tmp_path / "bench" / "h200-sm90-torch2.11.0-cu130.jsonl")] == [_row().id]
    assert rebuilt == []  # there is no evidence beside it
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "x.jsonl").touch()
    run("--reports", str(tmp_path))
    assert rebuilt == [tmp_path]
    done = run("--reports", str(tmp_path / "other"), "--no-reports")
    assert "| `net/detect/8px-b2-float32` |" in done.stdout
    assert not (tmp_path / "other").exists()


def test_the_command_says_what_an_emulated_device_is_worth_and_records_nothing(tmp_path, monkeypatch):
    done = _command(monkeypatch, [_found("emulated")], "emulated")("--reports", str(tmp_path))
    assert done.exit_code == 0
    assert EMULATED in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([Unmeasured(_row().id, "judged", "host-sync", "")], 1),
        ([Unmeasured(_row().id, "crashed", "", ""), _found()], 1),
        ([Unmeasured(_row().id, "unavailable", "", ""), _found()], 0),
    ],
    ids=["nothing measured", "a crash", "an absent zoo"],
)
def test_exit_codes(found, code, monkeypatch):
    assert _command(monkeypatch, found)("--no-reports").exit_code == code
