"""A sample of the builders, one of every path: they build offline, alike, in eval mode, and run at every size they declare."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from families.libreyolo import ZOO as LIBREYOLO
from families.libreyolo.wrapper import offline
from families.torchvision import ZOO as TORCHVISION
from parity.judge.bits import same
from parity.rows import probes
from parity.rows.family import Family, Subject
from parity.rows.row import Settings
from parity.runtime import tree

FAMILIES = {f.key: f for zoo in (LIBREYOLO, TORCHVISION) for f in zoo.families if isinstance(f, Family)}
SAMPLED_LIBREYOLO = (
    "yolo9/detect", "yolonas/obb", "rtdetr/detect", "rfdetr/obb", "rtdetrv2/obb", "ec/pose", "fomo/point", "dinov2/embed",
    "clip/embed", "pidnet/semantic", "birefnet/matte", "ppocr/ocr", "sam/segment", "sam2/segment", "sam3/segment", "edgetam/segment",
    "picosam3/segment", "sensenova/vlm",
)  # fmt: skip
SAMPLED_TORCHVISION = (
    "googlenet/classify", "resnet18/classify", "lraspp_mobilenet_v3_large/segment",
    "fasterrcnn_mobilenet_v3_large_320_fpn/detect", "fcos_resnet50_fpn/detect", "raft_small/flow", "mc3_18/video",
)  # fmt: skip
SAMPLE = [*(f"libreyolo/{key}" for key in SAMPLED_LIBREYOLO), *(f"torchvision/{key}" for key in SAMPLED_TORCHVISION)]


# what a zoo warns of while it is imported or run is not ours to fix
pytestmark = pytest.mark.filterwarnings("ignore")


def built(family: Family, boundary: str = "") -> Subject:
    torch.manual_seed(0)
    random.seed(0)
    return family.build(Settings(family.sizes[0], 1, family.dtype, boundary))


def arguments(family: Family, probe: str, size: int, batch: int) -> tuple[Any, ...]:
    made: tuple[Any, ...] = probes.make(family.inputs(size, batch), probe, 0)[0]
    return made


def outputs(subject: Subject, args: tuple[Any, ...]) -> list[torch.Tensor]:
    with torch.no_grad():
        leaves = tree.flatten(subject.compose(subject.region)(*args))[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("key", SAMPLE)
def test_a_family_builds_alike_and_runs_at_every_declared_shape(key: str, alone: Any) -> None:
    family = FAMILIES[key]
    first, second = built(family), built(family)
    state = dict(first.module.state_dict())
    assert state.keys() == second.module.state_dict().keys()
    assert all(same(state[name], tensor) for name, tensor in second.module.state_dict().items())
    assert not any(module.training for module in first.module.modules())
    assert all(p.device.type == "cpu" for p in first.module.parameters())

    size = family.sizes[0]
    ours, theirs = outputs(first, arguments(family, "A", size, 1)), outputs(first, arguments(family, "B", size, 1))
    assert any(not same(a, b) for a, b in zip(ours, theirs, strict=False)), "no output depends on the input"
    assert all(bool(torch.isfinite(leaf).all()) for leaf in ours if leaf.is_floating_point())
    if family.other_size is not None:
        assert outputs(first, arguments(family, "A", family.other_size, 1))
    assert family.other_batch is not None
    assert outputs(first, arguments(family, "A", size, family.other_batch))
    again = outputs(first, arguments(family, "A", size, 1))
    assert all(same(a, b) for a, b in zip(ours, again, strict=True))
    assert list(alone.iterdir()) == [], "a builder left files in the current folder"


@pytest.mark.parametrize("key", ["libreyolo/yolo9/detect", "libreyolo/birefnet/matte", "libreyolo/ppocr/ocr", "libreyolo/sam/segment",
                                 "libreyolo/sensenova/vlm"])  # fmt: skip
def test_the_native_path_raises_where_the_library_would_fall_back(key: str, alone: Any) -> None:
    family = FAMILIES[key]
    subject = built(family)
    assert subject.native is not None
    native = subject.native()
    with pytest.raises(Exception, match=r"CUDA is not available|not cuda") as caught:
        native(*arguments(family, "A", family.sizes[0], 1))
    assert type(caught.value).__name__ == "CudaGraphUnavailable"
    native.release()


@pytest.mark.parametrize("key", ["libreyolo/fomo/point", "libreyolo/birefnet/matte", "libreyolo/ppocr/ocr", "libreyolo/sam/segment",
                                 "libreyolo/sensenova/vlm"])  # fmt: skip
def test_the_native_path_replays_and_says_so_where_it_does_not(key: str, alone: Any) -> None:
    from parity.runtime.emulated import device

    family = FAMILIES[key]
    eager = built(family)
    made = {probe: arguments(family, probe, family.sizes[0], 1) for probe in "AB"}
    held = []  # SenseNova's graph reads the positions of the call that it was captured with, and nobody else keeps them
    with device():
        subject, cuda = built(family).to(torch.device("cuda", 0)), eager.to(torch.device("cuda", 0))
        assert subject.native is not None
        native = subject.native()
        for probe in "ABA":
            args = tuple(a.to("cuda") if isinstance(a, torch.Tensor) else a for a in made[probe])
            held.append(args)
            replayed = [leaf for leaf in tree.flatten(native(*args))[0] if isinstance(leaf, torch.Tensor)]
            assert all(same(a, b) for a, b in zip(replayed, outputs(cuda, args), strict=True))
        info = native.wrapper.graph_info()  # type: ignore[attr-defined]
        assert [graph["replays"] for graph in info["captured"]] == [3]
        native.dispatch = lambda *args: None  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="eagerly instead of replaying"):
            native(*args)


@pytest.mark.parametrize("key", ["libreyolo/birefnet/matte", "libreyolo/depth_anything3/depth"])
def test_a_seam_finishes_what_the_stand_in_began(key: str, alone: Any) -> None:
    family = FAMILIES[key]
    cut, whole = built(family), built(family, "whole")
    args = arguments(family, "A", family.sizes[0], 1)
    reference = outputs(whole, args)
    assert all(same(a, b) for a, b in zip(outputs(cut, args), reference, strict=True))

    def silenced(*values: Any) -> Any:
        leaves, spec = tree.flatten(cut.region(*values))
        return tree.unflatten([torch.zeros_like(leaf) for leaf in leaves], spec)

    with torch.no_grad():
        assert not same(cut.compose(silenced)(*args), reference[0]), "the stand-in was not asked"
    assert all(same(a, b) for a, b in zip(outputs(cut, args), reference, strict=True)), "the stand-in stayed behind"


def test_placing_moves_what_the_wrapper_itself_holds(alone: Any) -> None:
    subject = built(FAMILIES["libreyolo/clip/classify"])
    assert subject.native is not None
    wrapper: Any = subject.native().wrapper  # type: ignore[attr-defined]
    assert wrapper._text_embeds.device.type == "cpu"
    subject.to(torch.device("meta"))
    assert wrapper.device.type == "meta"
    assert wrapper._text_embeds.device.type == "meta"
    assert {p.device.type for p in subject.module.parameters()} == {"meta"}


@pytest.mark.parametrize("key", ["yolox/detect", "yolo9/detect", "picodet/detect", "fomo/point", "rfdetr/obb"])
def test_the_declared_range_is_what_preprocessing_makes_of_black_and_white(key: str, alone: Any) -> None:
    from PIL import Image

    family = FAMILIES[f"libreyolo/{key}"]
    subject = built(family)
    assert subject.native is not None
    wrapper: Any = subject.native().wrapper  # type: ignore[attr-defined]
    (spec,) = family.inputs(family.sizes[0], 1)
    black, white = (wrapper._preprocess(Image.new("RGB", (64, 64), (v, v, v)))[0] for v in (0, 255))
    assert round(float(black.min()), 3) == round(spec.low, 3)
    assert round(float(white.max()), 3) == round(spec.high, 3)


def test_offline_leaves_the_environment_as_it_was(warmed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with offline():
        assert constants.HF_HUB_OFFLINE
        assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert not constants.HF_HUB_OFFLINE
    assert "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with offline():
        pass
    assert os.environ["HF_HUB_OFFLINE"] == "0"
