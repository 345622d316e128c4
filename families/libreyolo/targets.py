"""Batches for LibreYOLO's trainers: images, and targets in the layouts of its data loaders. Alike for equal arguments, on the host."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from parity.rows.family import Input
from parity.rows.probes import draw
from parity.rows.row import Settings

if TYPE_CHECKING:
    import torch

Draw = Callable[[Settings, "torch.Generator"], "torch.Tensor"]

IGNORED = 255  # the label of pixels that the semantic losses leave out
_FOMO_CELL = 8  # pixels of one cell of FOMO's grid


def number(probe: str, seed: int, what: str) -> int:
    """32 bits that differ from probe to probe, from seed to seed, and between what is drawn."""
    return zlib.crc32(f"{probe}/{seed}/{what}".encode())


def batch(span: tuple[float, float], targets: Draw, settings: Settings, probe: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch: float32 images of shape (batch, 3, size, size) within ``span``, drawn as ``probe`` says, and the targets."""
    import torch

    images = draw(Input((settings.batch, 3, settings.size, settings.size), *span), probe, number(probe, seed, "images"))
    return images, targets(settings, torch.Generator().manual_seed(number(probe, seed, "targets")))


def boxes(rows: int, classes: int, pixels: bool, settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """One to five boxes per image, padded to ``rows``: float32 of shape (batch, rows, 5).

    ``pixels``: class, centre and extent in pixels, padded with zeros; else class and corners in units of the image, padded with
    boxes of class -1. As the loaders pass them on (the transforms of each family's trainer).
    """
    import torch

    made = torch.zeros(settings.batch, rows, 5)
    if not pixels:
        made[..., 0] = -1
    for image in made:
        count = int(torch.randint(1, 6, (), generator=generator))
        extent = 0.15 + 0.35 * torch.rand(count, 2, generator=generator)
        centre = extent / 2 + (1 - extent) * torch.rand(count, 2, generator=generator)
        corners = torch.cat([centre - extent / 2, centre + extent / 2], 1)
        image[:count, 0] = torch.randint(classes, (count,), generator=generator)
        image[:count, 1:] = torch.cat([centre, extent], 1) * settings.size if pixels else corners
    return made


def labels(classes: int, settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """One class per image: int64 of shape (batch,)."""
    import torch

    return torch.randint(classes, (settings.batch,), generator=generator)


def pixels(classes: int, settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """One class per pixel, a strip of them to be ignored: int64 of shape (batch, size, size)."""
    import torch

    made = torch.randint(classes, (settings.batch, settings.size, settings.size), generator=generator)
    made[:, :4] = IGNORED
    return made


def cells(settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """FOMO's grid, one object in about eight cells: int64 of shape (batch, size / 8, size / 8)."""
    import torch

    edge = settings.size // _FOMO_CELL
    return (torch.rand(settings.batch, edge, edge, generator=generator) < 0.125).long()


def clean(settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """What a degraded image should become: float32 of shape (batch, 3, size, size) within 0 to 1."""
    import torch

    return torch.rand(settings.batch, 3, settings.size, settings.size, generator=generator)
