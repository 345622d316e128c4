"""torchvision: every model it lists, the quantized ones aside, with random weights; of each classifier family, one is trained.

Importing this imports no model code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import zlib
from typing import Any

from parity.rows.family import Expect, Family, Input, Subject, Zoo
from parity.rows.probes import draw
from parity.rows.row import Settings
from parity.rows.training import Training, TrainSubject

_ARMS = ("bare", "graphed")  # torchvision captures nothing itself

IMAGENET = (-0.485 / 0.229, (1 - 0.406) / 0.225)
KINETICS = (-0.43216 / 0.22803, (1 - 0.37645) / 0.216989)
HALF = (-0.45 / 0.225, (1 - 0.45) / 0.225)

# Convolutions only: any size will do, and a small one shows the same kernels. Beside each name the size it was trained for.
CONVOLUTIONAL = {
    "alexnet": 224, "convnext_base": 224, "convnext_large": 224, "convnext_small": 224, "convnext_tiny": 224, "densenet121": 224,
    "densenet161": 224, "densenet169": 224, "densenet201": 224, "efficientnet_b0": 224, "efficientnet_b1": 240,
    "efficientnet_b2": 288, "efficientnet_b3": 300, "efficientnet_b4": 380, "efficientnet_b5": 456, "efficientnet_b6": 528,
    "efficientnet_b7": 600, "efficientnet_v2_l": 480, "efficientnet_v2_m": 480, "efficientnet_v2_s": 384, "googlenet": 224,
    "mnasnet0_5": 224, "mnasnet0_75": 224, "mnasnet1_0": 224, "mnasnet1_3": 224, "mobilenet_v2": 224, "mobilenet_v3_large": 224,
    "mobilenet_v3_small": 224, "regnet_x_16gf": 224, "regnet_x_1_6gf": 224, "regnet_x_32gf": 224, "regnet_x_3_2gf": 224,
    "regnet_x_400mf": 224, "regnet_x_800mf": 224, "regnet_x_8gf": 224, "regnet_y_128gf": 224, "regnet_y_16gf": 224,
    "regnet_y_1_6gf": 224, "regnet_y_32gf": 224, "regnet_y_3_2gf": 224, "regnet_y_400mf": 224, "regnet_y_800mf": 224,
    "regnet_y_8gf": 224, "resnet101": 224, "resnet152": 224, "resnet18": 224, "resnet34": 224, "resnet50": 224,
    "resnext101_32x8d": 224, "resnext101_64x4d": 224, "resnext50_32x4d": 224, "shufflenet_v2_x0_5": 224,
    "shufflenet_v2_x1_0": 224, "shufflenet_v2_x1_5": 224, "shufflenet_v2_x2_0": 224, "squeezenet1_0": 224, "squeezenet1_1": 224,
    "vgg11": 224, "vgg11_bn": 224, "vgg13": 224, "vgg13_bn": 224, "vgg16": 224, "vgg16_bn": 224, "vgg19": 224, "vgg19_bn": 224,
    "wide_resnet101_2": 224, "wide_resnet50_2": 224,
}  # fmt: skip
WINDOWED = ("swin_b", "swin_s", "swin_t", "swin_v2_b", "swin_v2_s", "swin_v2_t")
FIXED = (
    "maxvit_t",
    "vit_b_16",
    "vit_b_32",
    "vit_h_14",
    "vit_l_16",
    "vit_l_32",
)  # 224: learned positions, or a fixed grid
INCEPTION = ("inception_v3",)
# Their own initialisation is so small that the classes no longer depend on the image, and left unsaid it warns.
OLD = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}
SEGMENTATION = (
    "deeplabv3_mobilenet_v3_large", "deeplabv3_resnet101", "deeplabv3_resnet50", "fcn_resnet101", "fcn_resnet50",
    "lraspp_mobilenet_v3_large",
)  # fmt: skip
TWO_STAGE = (
    "fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_resnet50_fpn",
    "fasterrcnn_resnet50_fpn_v2", "keypointrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2",
)  # fmt: skip
ONE_STAGE = ("fcos_resnet50_fpn", "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2")
SINGLE_SHOT = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}
FLOW = ("raft_large", "raft_small")
VIDEO_CONVOLUTIONAL = ("mc3_18", "r2plus1d_18", "r3d_18")
VIDEO_POOLED = ("s3d",)
VIDEO_WINDOWED = ("swin3d_b", "swin3d_s", "swin3d_t")
VIDEO_FIXED = ("mvit_v1_b", "mvit_v2_s")


def _h2d(reason: str) -> dict[str, tuple[Expect, ...]]:
    return dict.fromkeys(_ARMS, (Expect("uncapturable", reason, cause="h2d-copy"),))


_NORMALIZE = _h2d("every forward copies the normalisation's mean and deviation from Python lists (detection/transform.py, normalize)")
_COORDINATES = _h2d("every forward builds its coordinate grids on the host and copies them (optical_flow/raft.py, make_coords_grid)")
_POSITIONS = _h2d("every block indexes its relative positions with an index built on the host (video/mvit.py, _add_rel_pos)")


def build(name: str, arguments: dict[str, Any], settings: Settings) -> Subject:
    """The model with random weights, in eval mode, on the host."""
    from torchvision.models import get_model

    sized = {"min_size": settings.size} if name in TWO_STAGE or name in ONE_STAGE else {}
    module = get_model(name, weights=None, **arguments, **sized).eval()
    return Subject(module, module)


def _image(span: tuple[float, float], size: int, batch: int) -> tuple[Input]:
    return (Input((batch, 3, size, size), *span),)


def _images(size: int, batch: int) -> tuple[list[Input]]:
    return ([Input((3, size, size)) for _ in range(batch)],)


def _pair(size: int, batch: int) -> tuple[Input, Input]:
    frame = Input((batch, 3, size, size), -1.0, 1.0)
    return (frame, frame)


def _clip(span: tuple[float, float], size: int, batch: int) -> tuple[Input]:
    return (Input((batch, 3, 16, size, size), *span),)


def _family(name: str, task: str, inputs: Any, sizes: tuple[int, ...], other_size: int | None, **more: Any) -> Family:
    arguments = more.pop("arguments", {})
    return Family(
        "torchvision",
        name,
        task,
        functools.partial(build, name, arguments),
        inputs,
        sizes,
        other_size=other_size,
        arms=_ARMS,
        builds_on_device=True,
        **more,
    )


def _classifiers() -> list[Family]:
    inputs = functools.partial(_image, IMAGENET)
    return [
        *(_family(n, "classify", inputs, (128, s), 96, arguments=OLD.get(n, {})) for n, s in CONVOLUTIONAL.items()),
        *(_family(n, "classify", inputs, (224,), 192) for n in WINDOWED),
        *(_family(n, "classify", inputs, (224,), None) for n in FIXED),
        *(_family(n, "classify", inputs, (299,), 267, arguments=OLD.get(n, {})) for n in INCEPTION),
    ]


def _detectors() -> list[Family]:
    # with random weights no box is above the usual threshold, and an empty result depends on nothing
    two = {"weights_backbone": None, "box_score_thresh": 0.0, "rpn_post_nms_top_n_test": 100, "box_detections_per_img": 10}
    one = {"weights_backbone": None, "score_thresh": 0.0}
    small = {"expected": _NORMALIZE}
    return [
        *(_family(n, "detect", _images, (224, 800), 192, arguments=two, **small) for n in TWO_STAGE),
        *(_family(n, "detect", _images, (224, 800), 192, arguments=one, **small) for n in ONE_STAGE),
        *(_family(n, "detect", _images, (s,), 256, arguments=one, **small) for n, s in SINGLE_SHOT.items()),
    ]


def _videos() -> list[Family]:
    kinetics, imagenet, half = (functools.partial(_clip, span) for span in (KINETICS, IMAGENET, HALF))
    expected = {"mvit_v2_s": _POSITIONS}
    return [
        *(_family(n, "video", kinetics, (112,), 96) for n in VIDEO_CONVOLUTIONAL),
        *(_family(n, "video", kinetics, (224,), 256) for n in VIDEO_POOLED),
        *(_family(n, "video", imagenet, (112, 224), 96) for n in VIDEO_WINDOWED),
        *(_family(n, "video", half, (224,), None, expected=expected.get(n, {})) for n in VIDEO_FIXED),
    ]


def _families() -> tuple[Family, ...]:
    segmentation = functools.partial(_image, IMAGENET)
    backbone = {"weights_backbone": None}
    return (
        *_classifiers(),
        *(_family(n, "segment", segmentation, (128, 520), 96, arguments=backbone) for n in SEGMENTATION),
        *_detectors(),
        *(_family(n, "flow", _pair, (128,), 136, expected=_COORDINATES) for n in FLOW),
        *_videos(),
    )


# One of each architecture that has code of its own. Beside each name the size it is trained at here, then another one.
TRAINED: dict[str, tuple[int, int | None]] = {
    "alexnet": (64, 96), "convnext_tiny": (64, 96), "densenet121": (64, 96), "efficientnet_b0": (64, 96),
    "efficientnet_v2_s": (64, 96), "googlenet": (64, 96), "inception_v3": (299, None), "maxvit_t": (224, None), "mnasnet0_5": (64, 96),
    "mobilenet_v2": (64, 96), "mobilenet_v3_small": (64, 96), "regnet_x_400mf": (64, 96), "regnet_y_400mf": (64, 96),
    "resnet18": (64, 96), "resnext50_32x4d": (64, 96), "shufflenet_v2_x0_5": (64, 96), "squeezenet1_0": (64, 96), "swin_t": (64, 96),
    "swin_v2_t": (64, 96), "vgg11": (64, 96), "vit_b_16": (64, None), "wide_resnet50_2": (64, 96),
}  # fmt: skip
_CLASSES = 1000
_AUXILIARY = 0.4  # weight of the loss of Inception's and GoogLeNet's auxiliary heads


def build_training(name: str, arguments: dict[str, Any], settings: Settings) -> TrainSubject:
    """The model with random weights, in training mode, on the host; its loss is the cross-entropy."""
    import torch
    from torchvision.models import get_model

    sized = {"image_size": settings.size} if name.startswith("vit_") else {}
    module = get_model(name, weights=None, **arguments, **sized).train()
    if name.startswith("vit_"):  # zero-initialised: nothing in front of it would get a gradient
        torch.nn.init.normal_(module.heads.head.weight, std=0.02)

    def loss(forward: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = forward(images)
        main, *auxiliary = out if isinstance(out, tuple) else (out,)
        total = torch.nn.functional.cross_entropy(main, labels)
        for head in auxiliary:
            total = total + _AUXILIARY * torch.nn.functional.cross_entropy(head, labels)
        return total

    return TrainSubject(module, module, loss)


def labelled(settings: Settings, probe: str, seed: int) -> tuple[Any, Any]:
    """Float32 images of shape (batch, 3, size, size), and one int64 class for each."""
    import torch

    number = zlib.crc32(f"{probe}/{seed}".encode())
    images = draw(Input((settings.batch, 3, settings.size, settings.size), *IMAGENET), probe, number)
    generator = torch.Generator().manual_seed(number ^ 1)
    return images, torch.randint(_CLASSES, (settings.batch,), generator=generator)


def _trained() -> list[Training]:
    return [
        Training(
            "torchvision",
            name,
            "classify",
            functools.partial(build_training, name, OLD.get(name, {})),
            labelled,
            size=size,
            batch=4 if name in INCEPTION else 2,  # its auxiliary head normalises single pixels: two images would always be +1 and -1
            other_size=other,
            arms=("graphed",),
            seam="the whole network; cross-entropy is eager",
            mechanism="classifier",
        )
        for name, (size, other) in TRAINED.items()
    ]


def version() -> str:
    """Raises PackageNotFoundError where torchvision is not installed."""
    return importlib.metadata.version("torchvision")


def warm() -> None:
    """Imports every model."""
    importlib.import_module("torchvision.models")


ZOO = Zoo(
    "torchvision",
    "torchvision",
    "pip install 'cuda-graph-parity[torchvision]'",
    families=(*_families(), *_trained()),
    warm=warm,
    version=version,
)
