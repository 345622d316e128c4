"""Dome-DETR cut behind its encoder. The library's own cut keeps the keys of the encoder's dictionary and drops its tensors
(base/detr_cuda_graph.py, ``list(feats)``), so that no loss can be computed from it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn


class Encoder(nn.Module):
    """Backbone and encoder, which know no targets: float images of shape (batch, 3, size, size) to the encoder's dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        found = dict(self.model.encoder(self.model.backbone(images), img_inputs=images))  # type: ignore[operator]
        del found["img_inputs"]
        return found


def loss(trainer: Any, forward: Any, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The trainer's own step, which resumes after ``forward(images)``: the decoder, the density targets and the criterion."""
    model = trainer.model
    found = forward(images)

    def resume(given: torch.Tensor, targets: Any = None) -> Any:
        density = model.encoder._gt_density_map(targets, given)
        return model.decoder({**found, "img_inputs": given, "defe": {**found["defe"], "gt_density_map": density}}, targets=targets)

    with mock.patch.object(model, "forward", resume):
        total: torch.Tensor = trainer.on_forward(images, targets)["total_loss"]
    return total
