"""The families whose training LibreYOLO captures: the network of each trainer's own specification, the rest of its step eager.

A trainer is built as its ``setup()`` builds it, without data, optimizer and average; nothing is written and nothing downloaded.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parity.rows.family import Expect
from parity.rows.row import Settings
from parity.rows.training import Training, TrainSubject

from . import targets
from .images import BYTES, IMAGENET, SIGNED, UNIT
from .targets import Draw
from .wrapper import offline, place

if TYPE_CHECKING:
    import torch

_COCO = 80
_IMAGENET = 1000
_ADE = 150
_VISDRONE = 12  # the variant with fewer queries


def corners(rows: int, classes: int = _COCO) -> Draw:
    return functools.partial(targets.boxes, rows, classes, False)


def centres(rows: int, classes: int = _COCO) -> Draw:
    return functools.partial(targets.boxes, rows, classes, True)


_LABELS = functools.partial(targets.labels, _IMAGENET)
_PIXELS = functools.partial(targets.pixels, _ADE)

_SEAMS = {
    "network": "the whole network up to the raw maps of its heads; assignment and loss are eager",
    "encoder": "backbone and encoder; decoder (its denoising queries depend on the targets) and criterion are eager",
    "classifier": "the whole network; cross-entropy is eager",
    "semantic": "the network up to its logits; resizing to the labels and cross-entropy are eager",
    "restore": "the whole network; the loss is eager",
    "point": "the whole network; cross-entropy is eager",
}

_TINYFORMER = Expect(
    "uncapturable",
    "every forward builds the position embedding on the host and copies it to the device (tinyformer/encoder.py, "
    "build_2d_sincos_position_embedding(...).to(src_flatten.device))",
    cause="h2d-copy",
    version="1.6",
)
_DOMEDETR = Expect(
    "uncapturable",
    "the density head asks on the host whether its maximum is positive (domedetr/defe.py, if density_max > 0), and the encoder "
    "whether a threshold leaves a cell (encoder.py, adaptive_defe_filter); the position embeddings are host copies besides",
    cause="host-sync",
    version="1.6",
)


def _on(expect: Expect) -> dict[str, tuple[Expect, ...]]:
    return dict.fromkeys(("graphed", "native"), (expect,))


@dataclass(frozen=True)
class Recipe:
    """A trainer class, the wrapper whose model it trains, and the small batch it is given.

    ``normalized``: the network has BatchNorm over as many values as there are images, and two would always be +1 and -1.
    """

    module: str
    cls: str
    trainer: str
    task: str
    variant: str
    size: int
    other: int | None
    draw: Draw
    mechanism: str = "network"
    span: tuple[float, float] = UNIT
    arguments: Mapping[str, Any] = field(default_factory=dict)
    normalized: bool = False
    expected: Mapping[str, tuple[Expect, ...]] = field(default_factory=dict)

    def training(self) -> Training:
        return Training(
            "libreyolo",
            self.module,
            self.task,
            build=functools.partial(build, self),
            draw=functools.partial(targets.batch, self.span, self.draw),
            size=self.size,
            batch=4 if self.normalized else 2,
            other_size=self.other,
            seam=_SEAMS[self.mechanism],
            mechanism=self.mechanism,
            expected=self.expected,
        )


def trainer_of(recipe: Recipe, settings: Settings) -> Any:
    """The trainer, its model in training mode with random weights, on the host. As ``train()`` makes it, but for two things: all of
    LingBot-Vision trains, where the library freezes the backbone, and FOMO's loss is there before its data."""
    where = f"libreyolo.models.{recipe.module}"
    wrapper_class = getattr(importlib.import_module(f"{where}.model"), recipe.cls)
    trainer_class = getattr(importlib.import_module(f"{where}.trainer"), recipe.trainer)
    with offline():
        wrapper = wrapper_class(size=recipe.variant, device="cpu", task=recipe.task, **{"model_path": None, **recipe.arguments})
        if recipe.module == "yolo9":
            wrapper.model.enable_aux(weight=0.25)  # LibreYOLO9.train() does
        trainer = trainer_class(
            model=wrapper.model,
            wrapper_model=wrapper,
            size=recipe.variant,
            num_classes=wrapper.nb_classes,
            data=None,
            epochs=10,
            batch=settings.batch,
            imgsz=settings.size,
            device="cpu",
            workers=0,
            amp=False,
            ema=False,
            cuda_graph=True,
        )
        trainer.on_num_classes_resolved()
        trainer.on_setup()
    if recipe.module == "fomo":
        from libreyolo.models.fomo.loss import FOMOLoss

        trainer._loss_fn = FOMOLoss(num_classes=wrapper.nb_classes)
    trainer.model.train()
    trainer._enforce_frozen_bn_eval()
    return trainer


def build(recipe: Recipe, settings: Settings) -> TrainSubject:
    """The trainer's network and step, on the host."""
    from . import domedetr, manager  # both need torch

    trainer = trainer_of(recipe, settings)
    if recipe.module == "domedetr":
        network: torch.nn.Module = domedetr.Encoder(trainer.model)
        loss = functools.partial(domedetr.loss, trainer)
    else:
        spec = trainer.cuda_graph_train_spec()
        network, loss = spec.network, functools.partial(_loss, spec)
    return TrainSubject(
        trainer.model,
        network,
        loss,
        place=functools.partial(_place, trainer),
        native=lambda: manager.NativeTraining(trainer, network),
        switch=functools.partial(_close_mosaic, trainer) if recipe.module == "yolox" else None,
    )


def _loss(spec: Any, forward: Any, images: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = spec.assemble(forward(images), images, wanted, None)["total_loss"]
    return total


def _place(trainer: Any, device: torch.device) -> None:
    """The model, what its wrapper holds, and the criterion."""
    import torch

    place(trainer.wrapper_model, device)
    trainer.device = device
    for value in vars(trainer).values():
        if isinstance(value, torch.nn.Module) and value is not trainer.model:
            value.to(device)


def _close_mosaic(trainer: Any) -> None:
    """What YOLOX's trainer does when mosaic closes (yolox/trainer.py, on_mosaic_disable), the data aside: the L1 branch."""
    trainer.model.head.use_l1 = True
    trainer.invalidate_cuda_graph("YOLOX enabled the L1 branch at mosaic close")


_DETR, _CE = "encoder", "classifier"
_NO_WEIGHTS: dict[str, Any] = {"model_path": {}}  # an empty state dict is the only spelling that downloads nothing

R = Recipe
RECIPES = (
    R("yolo9", "LibreYOLO9", "YOLO9Trainer", "detect", "t", 128, 160, corners(300)),
    R("yolo9_p2", "LibreYOLO9P2", "YOLO9P2Trainer", "detect", "t", 128, 160, corners(300)),
    R("yolo9_e2e", "LibreYOLO9E2E", "YOLO9E2ETrainer", "detect", "t", 128, 160, corners(300)),
    R("yolox", "LibreYOLOX", "YOLOXTrainer", "detect", "n", 128, 160, centres(50), span=BYTES),
    R("yolo7", "LibreYOLO7", "YOLOv7Trainer", "detect", "b", 128, 160, corners(100)),
    R("yolonas", "LibreYOLONAS", "YOLONASTrainer", "detect", "s", 128, 160, centres(100)),
    R("picodet", "LibrePICODET", "PICODETTrainer", "detect", "s", 128, 160, centres(50), span=IMAGENET),
    R("rtmdet", "LibreRTMDet", "RTMDetTrainer", "detect", "t", 128, 160, centres(120), span=IMAGENET),
    R("rfdetr", "LibreRFDETR", "RFDETRTrainer", "detect", "n", 128, 160, centres(300), span=IMAGENET, arguments=_NO_WEIGHTS),
    R("dfine", "LibreDFINE", "DFINETrainer", "detect", "n", 256, 288, centres(120), _DETR),
    R("deim", "LibreDEIM", "DEIMTrainer", "detect", "n", 256, 288, centres(120), _DETR),
    R("deimv2", "LibreDEIMv2", "DEIMv2Trainer", "detect", "atto", 256, 288, centres(120), _DETR),
    R("rtdetr", "LibreRTDETR", "RTDETRTrainer", "detect", "r18", 256, 288, corners(300), _DETR, arguments={"_in_rebuild": True}),
    R("rtdetrv2", "LibreRTDETRv2", "RTDETRv2Trainer", "detect", "r18", 256, 288, corners(300), _DETR),
    R("rtdetrv4", "LibreRTDETRv4", "RTDETRv4Trainer", "detect", "s", 256, 288, centres(120), _DETR),
    R("ec", "LibreEC", "ECTrainer", "detect", "s", 256, 288, centres(120), _DETR, span=IMAGENET),
    R("resnet", "LibreResNet", "ResNetTrainer", "classify", "18", 64, 96, _LABELS, _CE, IMAGENET),
    R("convnext", "LibreConvNeXt", "ConvNeXtTrainer", "classify", "t", 64, 96, _LABELS, _CE, IMAGENET),
    R("mobilenetv4", "LibreMobileNetV4", "MobileNetV4Trainer", "classify", "s", 64, 96, _LABELS, _CE, IMAGENET, normalized=True),
    R("efficientnetv2", "LibreEfficientNetV2", "EfficientNetV2Trainer", "classify", "b0", 64, 96, _LABELS, _CE, IMAGENET),
    R("segformer", "LibreSegformer", "SegformerTrainer", "semantic", "b0", 128, 160, _PIXELS, "semantic"),
    R("lingbotvision", "LibreLingBotVision", "LingBotVisionTrainer", "semantic", "s", 128, 112, _PIXELS, "semantic"),
    R("fomo", "LibreFOMO", "FOMOTrainer", "point", "s", 96, 128, targets.cells, "point", SIGNED),
    R("nafnet", "LibreNAFNet", "NAFNetTrainer", "restore", "s", 64, 72, targets.clean, "restore"),
    # not among the library's documented ones, but their trainers hand out a specification all the same
    R("convnextv2", "LibreConvNeXtV2", "ConvNeXtV2Trainer", "classify", "atto", 64, 96, _LABELS, _CE, IMAGENET),
    R("domedetr", "LibreDOMEDETR", "DOMEDETRTrainer", "detect", "s", 320, 160, centres(120, _VISDRONE), _DETR,
      arguments={"weight_variant": "visdrone", "nb_classes": _VISDRONE}, expected=_on(_DOMEDETR)),
    R("gtr", "LibreGTR", "GTRTrainer", "detect", "s", 128, 160, centres(300), _DETR, IMAGENET),
    R("tinyformer", "LibreTinyFormer", "TinyFormerTrainer", "detect", "s", 256, 320, centres(120), _DETR, IMAGENET,
      expected=_on(_TINYFORMER)),
)  # fmt: skip

FAMILIES = tuple(recipe.training() for recipe in RECIPES)
