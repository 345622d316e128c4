"""The families that take one batch of images and are built by their own wrapper class."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from parity.rows.family import Expect, Family, Input, Subject
from parity.rows.row import DEFAULT_ARMS, Settings

from .wrapper import WHOLE, offline, subject_of

# What each family's preprocessing makes of black and white, over all channels.
UNIT = (0.0, 1.0)
BYTES = (0.0, 255.0)
SIGNED = (-1.0, 1.0)
IMAGENET = (-0.485 / 0.229, (1 - 0.406) / 0.225)
CLIP = (-0.48145466 / 0.26862954, (1 - 0.40821073) / 0.27577711)

_PPYOLOE = Expect(
    "uncapturable",
    "every forward builds its anchors on the host and copies them to the device (ppyoloe/nn.py, torch.cat(anchors).to(device))",
    cause="h2d-copy",
    version="1.6",
)
_YOLO9 = Expect(
    "wrong",
    "anchors and strides live in a one-entry cache that a forward at any other size or batch replaces; the graph goes on "
    "reading the block that was freed",
    cause="stale-address",
    version="1.6",
)
_RFDETR = Expect(
    "wrong",
    "the transformer keeps its spatial shapes for one size (transformer.py, _cached_spatial_shapes); the next size replaces them, and "
    "the graph still reads the dead tensor, which the CUDA attention kernel uses",
    cause="stale-address",
    version="1.6",
    engines=("cuda",),
)
_EC_POSE = Expect(
    "wrong",
    "the decoder's projection is derived from frozen parameters and cached by their version; the graph reads the cached "
    "vector, so an update of those parameters in place never reaches a replay",
    cause="stale-constant",
    version="1.6",
)
_BIREFNET = Expect(
    "wrong",
    "deform_conv2d launches its kernel on the legacy default stream: it runs during the capture and is not in the graph",
    cause="side-stream",
    version="1.6",
    engines=("cuda",),
    boundary=WHOLE,
)
_SKY = Expect(
    "uncapturable",
    "the sky step counts pixels and branches on the count, on the host",
    cause="host-sync",
    version="1.6",
    boundary=WHOLE,
)


def _on(expect: Expect, *arms: str) -> dict[str, tuple[Expect, ...]]:
    return dict.fromkeys(arms, (expect,))


@dataclass(frozen=True)
class Architecture:
    """A wrapper class at one task and variant.

    ``loads``: its constructor insists on weights, and must be kept from it. ``rebuilds``: the network is made for one image size,
    and the wrapper can make it anew for another, as it does for checkpoints.
    """

    module: str
    cls: str
    task: str
    variant: str
    recommended: int
    native: int
    other: int | None
    span: tuple[float, float] = UNIT
    arguments: Mapping[str, Any] = field(default_factory=dict)
    loads: bool = False
    rebuilds: bool = False
    boundaries: tuple[str, ...] = ("",)
    expected: Mapping[str, tuple[Expect, ...]] = field(default_factory=dict)

    def family(self) -> Family:
        return Family(
            "libreyolo",
            self.module,
            self.task,
            build=functools.partial(build, self),
            inputs=functools.partial(_image, self.span),
            sizes=(self.recommended,) if self.recommended == self.native else (self.recommended, self.native),
            other_size=self.other,
            boundaries=self.boundaries,
            expected=self.expected,
        )


def _image(span: tuple[float, float], size: int, batch: int) -> tuple[Input]:
    return (Input((batch, 3, size, size), *span),)


def build(architecture: Architecture, settings: Settings) -> Subject:
    """The wrapper with random weights, in eval mode, on the host."""
    cls = getattr(importlib.import_module(f"libreyolo.models.{architecture.module}.model"), architecture.cls)
    with contextlib.ExitStack() as stack:
        stack.enter_context(offline())
        if architecture.loads:
            stack.enter_context(mock.patch.object(cls, "_load_weights", return_value=None))
        arguments = {"model_path": None, **architecture.arguments}
        wrapper = cls(size=architecture.variant, device="cpu", task=architecture.task, **arguments)
        if architecture.rebuilds and wrapper.input_size != settings.size:
            wrapper._rebuild_for_new_image_size(settings.size)
    return subject_of(wrapper, settings.boundary)


_LABELS = {"classes": ["a cat", "a dog", "a bicycle"]}
_NO_WEIGHTS: dict[str, Any] = {"model_path": {}}  # an empty state dict is the only spelling that downloads nothing

A = Architecture
ARCHITECTURES = (
    A("yolo1", "LibreYOLO1", "detect", "t", 448, 448, None),
    A("yolo2", "LibreYOLO2", "detect", "t", 256, 640, 224),
    A("yolo3", "LibreYOLO3", "detect", "t", 256, 640, 224),
    A("yolo4", "LibreYOLO4", "detect", "t", 256, 640, 224),
    A("yolo9", "LibreYOLO9", "detect", "t", 256, 640, 224, expected=_on(_YOLO9, "bare", "native")),
    A("yolo9_p2", "LibreYOLO9P2", "detect", "t", 256, 640, 224, expected=_on(_YOLO9, "bare", "native")),
    A("yolo9_e2e", "LibreYOLO9E2E", "detect", "t", 256, 640, 224, expected=_on(_YOLO9, "bare", "native")),
    A("yolonas", "LibreYOLONAS", "detect", "s", 256, 640, 224),
    A("picodet", "LibrePICODET", "detect", "s", 256, 640, 224, IMAGENET),
    A("rtmdet", "LibreRTMDet", "detect", "t", 256, 640, 224, IMAGENET),
    A("dfine", "LibreDFINE", "detect", "n", 256, 640, 288),  # below 256 there are fewer than 300 tokens to choose from
    A("deim", "LibreDEIM", "detect", "n", 256, 640, 288),
    A("deimv2", "LibreDEIMv2", "detect", "atto", 256, 640, 224),
    A("rtdetr", "LibreRTDETR", "detect", "r18", 256, 640, 224, arguments={"_in_rebuild": True}),
    A("rtdetrv2", "LibreRTDETRv2", "detect", "r18", 256, 640, 224),
    A("rtdetrv4", "LibreRTDETRv4", "detect", "s", 256, 640, 224),
    A("rfdetr", "LibreRFDETR", "detect", "n", 256, 640, 224, IMAGENET, arguments=_NO_WEIGHTS, expected=_on(_RFDETR, "bare", "native")),
    A("ec", "LibreEC", "detect", "s", 256, 640, 224, IMAGENET),
    A("yolox", "LibreYOLOX", "detect", "n", 256, 416, 224, BYTES),
    A("yolo7", "LibreYOLO7", "detect", "b", 256, 640, 224),
    A("ppyoloe", "LibrePPYOLOE", "detect", "s", 256, 640, 224, IMAGENET, expected=_on(_PPYOLOE, *DEFAULT_ARMS)),
    A("dfine", "LibreDFINE", "segment", "n", 256, 640, 288),
    A("rtmdet", "LibreRTMDet", "segment", "t", 256, 640, 224, IMAGENET),
    A("rfdetr", "LibreRFDETR", "segment", "n", 240, 636, 228, IMAGENET, arguments=_NO_WEIGHTS, expected=_on(_RFDETR, "bare", "native")),
    A("ec", "LibreEC", "segment", "s", 256, 640, 224, IMAGENET),
    A("eomt", "LibreEoMT", "segment", "s", 128, 640, None, rebuilds=True),
    A("eomt", "LibreEoMT", "panoptic", "s", 128, 640, None, rebuilds=True),
    A("ec", "LibreEC", "pose", "s", 256, 640, 224, IMAGENET, expected=_on(_EC_POSE, "bare", "native")),
    A("yolonas", "LibreYOLONAS", "pose", "s", 256, 640, 224),
    A("rfdetr", "LibreRFDETR", "pose", "x", 240, 648, 216, IMAGENET, expected=_on(_RFDETR, "bare", "native")),
    A("yolonas", "LibreYOLONAS", "obb", "s", 256, 640, 224),
    A("rtdetrv2", "LibreRTDETRv2", "obb", "n", 256, 640, 288),
    A("rfdetr", "LibreRFDETR", "obb", "n", 256, 640, 224, IMAGENET, arguments=_NO_WEIGHTS, expected=_on(_RFDETR, "bare", "native")),
    A("fomo", "LibreFOMO", "point", "s", 96, 96, 104, SIGNED),
    A("resnet", "LibreResNet", "classify", "18", 128, 224, 96, IMAGENET),
    A("convnext", "LibreConvNeXt", "classify", "t", 128, 224, 96, IMAGENET),
    A("mobilenetv4", "LibreMobileNetV4", "classify", "s", 128, 224, 96, IMAGENET),
    A("efficientnetv2", "LibreEfficientNetV2", "classify", "b0", 128, 224, 96, IMAGENET),
    A("clip", "LibreCLIP", "classify", "b32", 224, 224, None, CLIP, arguments=_LABELS, loads=True),
    A("dinov2", "LibreDINOv2", "classify", "n", 224, 644, 210, IMAGENET),
    A("siglip2", "LibreSigLIP2", "classify", "b16", 256, 256, None, SIGNED, arguments=_LABELS, loads=True),
    A("clip", "LibreCLIP", "embed", "b32", 224, 224, None, CLIP, loads=True),
    A("dinov2", "LibreDINOv2", "embed", "n", 224, 644, 210, IMAGENET),
    A("siglip2", "LibreSigLIP2", "embed", "b16", 256, 256, None, SIGNED, loads=True),
    A("eomt", "LibreEoMT", "semantic", "s", 128, 512, None, rebuilds=True),
    A("dinov2", "LibreDINOv2", "semantic", "n", 224, 644, 210),
    A("segformer", "LibreSegformer", "semantic", "b0", 128, 512, 96),
    A("pidnet", "LibrePIDNet", "semantic", "s", 128, 1024, 136),
    A("lingbotvision", "LibreLingBotVision", "semantic", "s", 128, 512, 112),
    A("depth_anything", "LibreDepthAnythingV2", "depth", "s", 224, 644, 210),
    A(
        "depth_anything3", "LibreDepthAnything3", "depth", "l", 112, 644, 98,
        boundaries=("", WHOLE), expected=_on(_SKY, "bare", "graphed"),
    ),
    A("zipdepth", "LibreZipDepth", "depth", "b", 256, 384, 224),
    A("nafnet", "LibreNAFNet", "restore", "s", 64, 256, 72),
    A("realesrgan", "LibreRealESRGAN", "restore", "x4", 32, 64, 40),
    A("swinir", "LibreSwinIR", "restore", "s", 64, 64, 72),
    A(
        "birefnet", "LibreBiRefNet", "matte", "t", 128, 1024, 160, IMAGENET,
        boundaries=("", WHOLE), expected=_on(_BIREFNET, "bare", "graphed"),
    ),
    A("feynobg", "LibreFeyNobg", "matte", "l", 128, 1024, 160, IMAGENET),
)  # fmt: skip

FAMILIES = tuple(architecture.family() for architecture in ARCHITECTURES)
