"""What of LibreYOLO is installed here, and what a certificate must say about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os

from .images import ARCHITECTURES
from .training import RECIPES

_TOWERS = (
    "ppocr.model",
    "ppocr.inference",
    "sam.model",
    "mobilesam.model",
    "picosam3.model",
    "sensenova.model",
    "sensenova.modeling.bagel",
    "sensenova.modeling.qwen2_navit",
    "sensenova.modeling.siglip_navit",
)
# Lazily imported by the library, transformers, timm and the tokenizers at the first build or step.
_LAZY = (
    "cv2",
    "ftfy",
    "huggingface_hub",
    "libreyolo.cli.aliases",
    "libreyolo.models.fomo.loss",
    "libreyolo.models.yolo7.loss",
    "libreyolo.models.yolo9.loss",
    "libreyolo.training.cuda_graph",
    "sentencepiece",
    "timm",
    "torchvision",
    "transformers.models.dinov2.modeling_dinov2",
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers",
    "transformers.models.edgetam.modeling_edgetam",
    "transformers.models.sam.modeling_sam",
    "transformers.models.sam2.modeling_sam2",
    "transformers.models.sam3_tracker.modeling_sam3_tracker",
    "transformers.models.timm_wrapper.modeling_timm_wrapper",
)


def version() -> str:
    """Raises PackageNotFoundError where LibreYOLO is not installed."""
    return importlib.metadata.version("libreyolo")


def warm() -> None:
    """Imports all that the builders will need."""
    models = (f"{architecture.module}.model" for architecture in ARCHITECTURES)
    trainers = (f"{recipe.module}.{part}" for recipe in RECIPES for part in ("model", "trainer"))
    for module in dict.fromkeys((*models, *trainers, *_TOWERS)):
        importlib.import_module(f"libreyolo.models.{module}")
    for module in _LAZY:
        importlib.import_module(module)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def environment() -> dict[str, str]:
    """Libraries and switches that choose other kernels for the same forward."""
    switches = ("LIBREYOLO_HUB_KERNELS", "LIBREYOLO_KERNELS", "LIBREYOLO_QUANT_KERNELS")
    packages = ("transformers", "timm", "torchvision", "triton", "kernels", "flash-attn", "flash-linear-attention")
    return {
        **{name: os.environ.get(name, "unset") for name in switches},
        **{name: _installed(name) for name in packages},
    }
