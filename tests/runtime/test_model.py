"""The mixin: modes, scopes, generators, obedience to the allowlist."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.runtime import CudaGraphModel, NotCertified, Seam
from parity.runtime.allowlist import FILE, SCHEMA, Certificate, Environment, Tried, arch_name, checksum
from parity.runtime.emulated import device
from parity.runtime.state import same_bits

TRIED = (Tried(8, 1, "float32", ((1, 3, 8, 8),)),)


class Zoo(CudaGraphModel):
    cuda_graph_zoo, cuda_graph_family, cuda_graph_task, cuda_graph_version = "zoo", "net", "detect", "1.0"

    def __init__(self) -> None:
        self.model: nn.Module = nn.Conv2d(3, 2, 3, padding=1).eval()

    def to(self, where: str) -> Zoo:
        self.model.to(where)
        return self

    def predict(self, x: Tensor, cuda_graph: Any = False) -> Tensor:
        with self.cuda_graph_scope(cuda_graph), torch.inference_mode():
            return self.model(x)

    def video(self, frames: list[Tensor], cuda_graph: Any = False) -> Iterator[Tensor]:
        def steps() -> Iterator[Tensor]:
            for x in frames:
                with torch.inference_mode():
                    y = self.model(x)
                yield y

        return self.cuda_graph_steps(steps(), cuda_graph)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allowlist for this very environment."""
    with device():
        return listing(tmp_path, monkeypatch, Zoo()._environment())


def listing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, environment: Environment, tried: tuple[Tried, ...] = TRIED, **more: Any
) -> Path:
    certificate = Certificate("zoo", "net", "detect", "inference", "here", environment, tried, **more)
    body = {"schema": SCHEMA, "environments": ["here"], "certificates": [certificate.to_dict()]}
    body = json.loads(json.dumps(body))
    path = folder / f"{len(list(folder.iterdir()))}-{FILE}"
    path.write_text(json.dumps(body | {"checksum": checksum(body)}))
    monkeypatch.setattr(Zoo, "cuda_graph_allowlist", path)
    return path


def image(size: int = 8) -> Tensor:
    return torch.randn(1, 3, size, size, device="cuda")


def piece(zoo: Zoo) -> dict[str, Any]:
    found: dict[str, Any] = zoo.graph_info()["pieces"][""]
    return found


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize(("mode", "captures", "replays"), [(False, 0, 0), (True, 1, 5), ("auto", 1, 3)])
def test_modes(mode: Any, captures: int, replays: int) -> None:
    with device():
        zoo = Zoo().to("cuda")
        for _ in range(5):
            x = image()
            assert same_bits(zoo.predict(x, mode), zoo.predict(x))
        if mode is not False:
            assert (piece(zoo)["captures"], piece(zoo)["replays"]) == (captures, replays)
        else:
            assert zoo.graph_info()["pieces"] == {}


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("mode", ["on", "AUTO", 1, 0, None, 2.0])
def test_other_modes_are_refused(mode: Any) -> None:
    with device(), pytest.raises(ValueError, match='it is False, True or "auto"'):
        Zoo().to("cuda").predict(image(), mode)


@pytest.mark.usefixtures("listed")
def test_one_shot_and_shape_varying_work_never_captures_in_auto() -> None:
    with device():
        zoo = Zoo().to("cuda")
        for size in (8, 9, 10, 8, 9, 10):
            zoo.predict(image(size), "auto")
        assert piece(zoo)["captures"] == 0


@pytest.mark.usefixtures("listed")
def test_on_the_host_eager_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    zoo, x = Zoo(), torch.randn(1, 3, 8, 8)
    for _ in range(3):
        assert same_bits(zoo.predict(x, True), zoo.predict(x))
    assert len([r for r in caplog.records if "runs eager" in r.message]) == 1
    with device():
        caplog.clear()
        zoo = Zoo()
        for _ in range(3):
            zoo.predict(x, True)
        assert [r.message for r in caplog.records] == ["cuda_graph: Conv2d runs eager: no input is on a CUDA device"]


@pytest.mark.usefixtures("listed")
def test_steps_of_a_generator_are_graphed_after_the_call_returned() -> None:
    with device():
        zoo = Zoo().to("cuda")
        frames = [image() for _ in range(4)]
        video = zoo.video(frames, True)
        assert zoo.graph_info()["pieces"] == {}  # nothing ran yet
        for x, y in zip(frames, video, strict=True):
            assert "forward" not in vars(zoo.model)  # between two steps the model is as it was
            assert same_bits(y, zoo.predict(x))
        assert piece(zoo)["replays"] == 4
        with pytest.raises(ValueError, match="it is False"):
            zoo.video(frames, "yes")


def test_a_family_that_is_not_listed_is_refused_by_name_and_with_the_command(listed: Path) -> None:
    class Other(Zoo):
        cuda_graph_family = "unknown_net"

    with device():
        other = Other().to("cuda")
        assert not other.SUPPORTS_CUDA_GRAPH
        assert Zoo().SUPPORTS_CUDA_GRAPH
        with pytest.raises(NotImplementedError) as caught:
            other.predict(image(), True)
        for word in (str(listed), "unknown_net", "detect", "inference", "parity certify --zoo zoo --family unknown_net --task detect"):
            assert word in str(caught.value)
        assert isinstance(caught.value, NotCertified)
        other.predict(image(), False)
    with pytest.raises(NotCertified):  # on the host too: the answer does not depend on the machine
        Other().predict(torch.zeros(1, 3, 8, 8), True)


class Frozen(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_elsewhere_the_first_use_validates_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device():
        here = Zoo()._environment()
        elsewhere = Environment("sm70", here.torch, here.cuda, here.cudnn, here.zoo)
        good, bad, trusted = Zoo().to("cuda"), Zoo().to("cuda"), Zoo().to("cuda")
        bad.model = Frozen()
        trusted.model = Frozen()
        listing(tmp_path, monkeypatch, elsewhere)
        x = image()
        assert same_bits(good.predict(x, True), good.predict(x))
        assert piece(good)["captures"] == 1
        bad.predict(x, True)
        (reason,) = piece(bad)["eager"]
        assert "was certified with arch sm70, this is sm90, and its first use did not validate" in reason
        assert piece(bad)["captures"] == 0
        listing(tmp_path, monkeypatch, here)
        trusted.predict(x, True)
        assert piece(trusted)["captures"] == 1  # the certificate covers it: nobody asked
        trusted.predict(image(9), True)  # a shape that was not tried validates
        assert piece(trusted)["captures"] == 1


def test_strict_never_validates(listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Zoo, "cuda_graph_policy", "strict")
    with device():
        zoo = Zoo().to("cuda")
        assert same_bits(zoo.predict(x := image(), True), zoo.predict(x))
        assert piece(zoo)["captures"] == 1
        with pytest.raises(NotCertified, match='was not tried with inputs 1x3x9x9 in float32, and policy="strict"'):
            zoo.predict(image(9), True)
        assert "forward" not in vars(zoo.model)
        monkeypatch.setattr(Zoo, "cuda_graph_policy", "lenient")
        with pytest.raises(ValueError, match="cuda_graph_policy='lenient'"):
            zoo.predict(image(), True)


@pytest.mark.usefixtures("listed")
def test_capture_graph_ahead_and_a_warning_when_nobody_uses_it(caplog: pytest.LogCaptureFixture) -> None:
    with device():
        zoo = Zoo().to("cuda")
        with pytest.raises(ValueError, match="needs imgsz"):
            zoo.capture_graph()
        zoo.capture_graph(8)
        assert piece(zoo)["captured"] == {"[1, 3, 8, 8] float32": 0}
        zoo.predict(image(), True)
        zoo.predict(image(10), True)
        assert caplog.records == []
        zoo.capture_graph((4, 6), batch=2)
        zoo.predict(image(11), True)
        zoo.predict(image(12), True)
        (record,) = caplog.records
        assert "was never used: [2, 3, 4, 6] float32" in record.message
        assert zoo.graph_info()["memory"]["inputs"] > 0


@pytest.mark.usefixtures("listed")
def test_release_copy_and_pickle() -> None:
    with device():
        zoo = Zoo().to("cuda")
        x = image()
        y = zoo.predict(x, True)
        zoo.release_graphs()
        assert piece(zoo)["captured"] == {}
        assert same_bits(zoo.predict(x, True), y)
        assert piece(zoo)["captures"] == 2
        twin = copy.deepcopy(zoo)
        assert twin.graph_info()["pieces"] == {}
        twin.model.weight.data.zero_()  # type: ignore[union-attr, operator]
        assert not same_bits(twin.predict(x, True), y)
        assert same_bits(zoo.predict(x, True), y)
        zoo.invalidate_graphs("told")
        assert piece(zoo)["dropped"] == {"released": 1, "told": 1}
    assert pickle.loads(pickle.dumps(Zoo())).graph_info()["pieces"] == {}


@pytest.mark.usefixtures("listed")
def test_a_model_that_is_let_go_of_is_free_at_once() -> None:
    with device():
        zoo = Zoo().to("cuda")
        zoo.predict(image(), True)
        network = weakref.ref(zoo.model)
        gc.collect()
        gc.disable()
        try:
            del zoo
            assert network() is None
        finally:
            gc.enable()


@pytest.mark.usefixtures("listed")
def test_another_network_in_the_same_wrapper() -> None:
    with device():
        zoo, x = Zoo().to("cuda"), image()
        zoo.predict(x, True)
        zoo.model = nn.Conv2d(3, 2, 3, padding=1).eval().to("cuda")
        assert same_bits(zoo.predict(x, True), zoo.predict(x))


@pytest.mark.usefixtures("listed")
def test_a_seam_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(Zoo):
        cuda_graph_seam = Seam(("0",))

        def __init__(self) -> None:
            self.model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU()).eval()

    with device():
        zoo, x = Cut().to("cuda"), image()
        assert same_bits(zoo.predict(x, True), zoo.predict(x))
        assert list(zoo.graph_info()["pieces"]) == ["0"]
    assert arch_name((9, 0)) == "sm90"


def test_auto_declines_what_was_measured_to_be_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with device():
        listing(tmp_path, monkeypatch, Zoo()._environment(), slower=TRIED)
        zoo = Zoo().to("cuda")
        for _ in range(6):
            x = image()
            assert same_bits(zoo.predict(x, "auto"), zoo.predict(x))
        assert piece(zoo)["captures"] == 0
        (told,) = [(why, count) for why, count in piece(zoo)["eager"].items() if "faster eagerly" in why]
        assert told[1] == 4  # all but the two that "auto" waits for anyway
        assert told[0].startswith("zoo/net/detect/inference was measured to be faster eagerly")
        assert len([r for r in caplog.records if "faster eagerly" in r.message]) == 1
        zoo.predict(image(), True)  # who asks for a graph gets one
        assert piece(zoo)["captures"] == 1
        for _ in range(3):  # another shape of the same family
            zoo.predict(image(9), "auto")
        assert piece(zoo)["captures"] == 2


@pytest.mark.parametrize(("field", "value"), [("torch", "1.0"), ("arch", "sm10")])
def test_a_measurement_elsewhere_says_nothing(field: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device():
        listing(tmp_path, monkeypatch, replace(Zoo()._environment(), **{field: value}), slower=TRIED)
        zoo = Zoo().to("cuda")
        for _ in range(4):
            zoo.predict(image(), "auto")
        assert piece(zoo)["captures"] == 1
