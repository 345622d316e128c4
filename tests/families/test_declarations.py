"""The declarations alone: complete, and readable where no model code is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from families.libreyolo import ZOO as LIBREYOLO
from families.torchvision import ZOO as TORCHVISION
from parity.judge.outcome import CAUSES
from parity.judge.verdict import VERDICTS
from parity.rows import probes
from parity.rows.family import Family, Input

ZOOS = {zoo.name: zoo for zoo in (LIBREYOLO, TORCHVISION)}
ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "torchvision", "libreyolo", "transformers", "timm", "numpy")
FAMILIES = [f for zoo in ZOOS.values() for f in zoo.families if isinstance(f, Family)]

UPSTREAM = {
    "detect": (
        "yolo1",
        "yolo2",
        "yolo3",
        "yolo4",
        "yolo9",
        "yolo9_p2",
        "yolo9_e2e",
        "yolox",
        "yolo7",
        "yolonas",
        "picodet",
        "rtmdet",
        "dfine",
        "deim",
        "deimv2",
        "rtdetr",
        "rtdetrv2",
        "rtdetrv4",
        "rfdetr",
        "ec",
    ),
    "segment": ("dfine", "rtmdet", "rfdetr", "ec"),
    "pose": ("ec", "yolonas", "rfdetr"),
    "point": ("fomo",),
    "classify": ("resnet", "convnext", "mobilenetv4", "efficientnetv2", "clip", "dinov2", "siglip2"),
    "semantic": ("eomt", "dinov2", "segformer", "pidnet", "lingbotvision"),
    "depth": ("depth_anything", "depth_anything3", "zipdepth"),
    "restore": ("nafnet", "realesrgan", "swinir"),
    "matte": ("birefnet",),
}


# what a zoo warns of while it is imported or run is not ours to fix
pytestmark = pytest.mark.filterwarnings("ignore")


def imported(statement: str) -> set[str]:
    """Which heavy packages a fresh interpreter has after a statement."""
    code = f"import sys; {statement}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("zoo", ZOOS)
def test_declarations_import_no_model_code(zoo: str) -> None:
    assert imported(f"from families.{zoo} import ZOO; assert ZOO.families") == set()


def test_the_check_above_would_see_an_import() -> None:
    assert "numpy" in imported("import numpy")


def test_the_upstream_rows_are_all_there() -> None:
    declared = {f.key.partition("/")[2] for f in FAMILIES if f.zoo == "libreyolo"}
    upstream = {f"{name}/{task}" for task, names in UPSTREAM.items() for name in names}
    assert len(upstream) == 47
    assert upstream <= declared
    assert {"ppyoloe/detect", "ppocr/ocr", "sam/segment", "sensenova/vlm"} <= declared


def test_every_family_that_libreyolo_flags_has_a_row(warmed: None) -> None:
    import importlib
    import pkgutil

    import libreyolo.models
    from libreyolo.models.base.model import BaseModel

    for package in pkgutil.iter_modules(libreyolo.models.__path__):
        if package.ispkg and importlib.util.find_spec(f"libreyolo.models.{package.name}.model"):
            importlib.import_module(f"libreyolo.models.{package.name}.model")
    classes, found = [BaseModel], set()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls.SUPPORTS_CUDA_GRAPH and cls.FAMILY and cls.__module__.startswith("libreyolo."):
            found |= {(cls.FAMILY, task) for task in cls.SUPPORTED_TASKS}
    # its seven tasks share one captured vision tower
    found = {pair for pair in found if pair[0] != "sensenovavision"} | {("sensenova", "vlm")}
    assert found == {(f.name, f.task) for f in FAMILIES if f.zoo == "libreyolo"}


def test_torchvision_lists_what_we_declare(warmed: None) -> None:
    from torchvision.models import list_models

    listed = [name for name in list_models() if not name.startswith("quantized")]
    declared = [f.name for f in FAMILIES if f.zoo == "torchvision"]
    assert sorted(declared) == sorted(listed)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.key)
def test_a_declaration_is_complete(family: Family) -> None:
    assert family.zoo in ZOOS
    assert 1 <= len(family.sizes) <= 2
    assert family.sizes == tuple(sorted(family.sizes)), "the recommended size comes first, and is the smaller one"
    assert family.other_size not in family.sizes[:1]
    assert family.other_batch not in (1, None)
    for arm, expects in family.expected.items():
        assert arm in family.arms
        for expect in expects:
            assert expect.verdict in VERDICTS
            assert expect.cause in CAUSES
            assert expect.boundary in family.boundaries
    assert not any(row.arm == "native" and row.settings.boundary for row in family.rows())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.key)
def test_probes_stay_within_the_declared_range(family: Family) -> None:
    from torch.utils import _pytree as pytree

    specs = pytree.tree_leaves(family.inputs(family.sizes[0], 1))
    assert any(isinstance(spec, Input) for spec in specs)
    for spec in specs:
        if isinstance(spec, Input):
            for name in probes.PROBES:
                drawn = probes.draw(spec, name, 0).double()
                assert spec.low - 0.01 <= float(drawn.min()) < float(drawn.max()) <= spec.high + 0.01, (name, spec)


def test_what_is_expected_to_fail_says_where_and_for_which_version() -> None:
    by_key = {f.key: f for f in FAMILIES}
    for name in ("yolo9", "yolo9_p2", "yolo9_e2e"):
        row = next(r for r in by_key[f"libreyolo/{name}/detect"].rows() if r.arm == "native")
        expect = by_key[f"libreyolo/{name}/detect"].expectation(row, "cuda", "1.6.0")
        assert expect is not None
        assert (expect.verdict, expect.cause) == ("wrong", "stale-address")
        assert by_key[f"libreyolo/{name}/detect"].expectation(row, "cuda", "1.7.0") is None
    birefnet = by_key["libreyolo/birefnet/matte"]
    whole = next(r for r in birefnet.rows() if r.settings.boundary == "whole")
    assert birefnet.expectation(whole, "cuda", "1.6.0") is not None
    assert birefnet.expectation(whole, "emulated", "1.6.0") is None, "only a device shows on which stream a kernel runs"
