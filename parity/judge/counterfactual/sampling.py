"""The backward of grid sampling without atomic additions: all modes, all paddings, two and three dimensions.

Per axis a point touches one, two or four pixels (nearest, linear, cubic): its taps, each with a weight and with the slope of that
weight along the grid. The formulas, down to the order of their roundings, are those of ATen's GridSampler.h, so that points on an edge
between two pixels fall to the same side.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

NEAREST: Final = 1
CUBIC: Final = 2
BORDER: Final = 1
REFLECTION: Final = 2
_A: Final = -0.75


@dataclass(frozen=True)
class Tap:
    """Along one axis, each of shape (N, *out): the pixel, whether it exists, its weight, and d weight / d grid."""

    index: Tensor
    inside: Tensor
    weight: Tensor
    slope: Tensor


def _reflect(at: Tensor, size: int, align_corners: bool) -> tuple[Tensor, Tensor]:
    low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
    if span == 0:
        return torch.zeros_like(at), torch.zeros_like(at)
    shifted = at - low
    away = shifted.abs()
    extra = torch.fmod(away, span)
    even = torch.floor(away / span) % 2 == 0
    turn = torch.where(shifted < 0, -1.0, 1.0).to(at.dtype)
    return torch.where(even, extra, span - extra) + low, torch.where(even, turn, -turn)


def _pad(at: Tensor, size: int, padding: int, align_corners: bool) -> tuple[Tensor, Tensor]:
    """Where a coordinate reads, and d of that / d coordinate."""
    turn = torch.ones_like(at)
    if padding == REFLECTION:
        at, turn = _reflect(at, size, align_corners)
    if padding in (BORDER, REFLECTION):
        turn = torch.where((at <= 0) | (at >= size - 1), 0, turn)
        at = at.clamp(0, size - 1)
    return at, turn


def _near(x: Tensor) -> tuple[Tensor, Tensor]:
    return ((_A + 2) * x - (_A + 3)) * x * x + 1, (3 * (_A + 2) * x - 2 * (_A + 3)) * x


def _far(x: Tensor) -> tuple[Tensor, Tensor]:
    return ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A, (3 * _A * x - 10 * _A) * x + 8 * _A


def taps(grid: Tensor, size: int, mode: int, padding: int, align_corners: bool) -> list[Tap]:
    """``grid``: one coordinate of each point in [-1, 1], (N, *out); ``size``: pixels along the axis."""
    at = ((grid + 1) / 2) * (size - 1) if align_corners else ((grid + 1) * size - 1) / 2
    rate = (size - 1) / 2 if align_corners else size / 2
    if mode == CUBIC:
        first = at.floor()
        t = at - first
        places = [_pad(first + k, size, padding, align_corners)[0] for k in (-1, 0, 1, 2)]
        curves = [_far(t + 1), _near(t), _near(1 - t), _far(2 - t)]
        weights = [w for w, _ in curves]
        slopes = [sign * d * rate for sign, (_, d) in zip((1, 1, -1, -1), curves, strict=True)]
    else:
        at, turn = _pad(at, size, padding, align_corners)
        if mode == NEAREST:
            places, weights, slopes = [at.round()], [torch.ones_like(at)], [torch.zeros_like(at)]
        else:
            first = at.floor()
            places = [first, first + 1]
            weights = [1 - (at - first), at - first]
            slopes = [-turn * rate, turn * rate]
    return [
        Tap(p.long().clamp(0, size - 1), (p >= 0) & (p < size), w, s)  # clamped as integers: a NaN has no place but must not fault
        for p, w, s in zip(places, weights, slopes, strict=True)
    ]


def counted(model: Tensor, n: int) -> Tensor:
    """0 to n - 1 as int64, where ``model`` lies: a device that is asked for by name may not exist (parity.runtime.emulated)."""
    return model.new_ones(n, dtype=torch.int64).cumsum(0) - 1


def backward(
    grad: Tensor, input: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """As ``aten::grid_sampler_2d_backward`` and ``_3d_``: ``grad`` (N, C, *out), ``input`` (N, C, *size), ``grid`` (N, *out, D).

    Returns the gradients of ``input`` and ``grid``, in their dtypes, or None where ``wanted`` says so.
    """
    batch, channels, *size = input.shape
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    rows = grad.to(wide).movedim(1, -1).reshape(-1, channels)
    axes = [taps(grid[..., -1 - d].to(wide), n, mode, padding, align_corners) for d, n in enumerate(size)]
    pixels = input.to(wide).movedim(1, -1).reshape(-1, channels)
    start = counted(grad, batch).view(batch, *[1] * len(size))
    places, values = [], []
    slopes = [torch.zeros_like(axes[0][0].weight) for _ in size]
    for corner in itertools.product(*axes):
        place = start
        inside, weight = torch.ones_like(corner[0].inside), torch.ones_like(corner[0].weight)
        for tap, n in zip(corner, size, strict=True):
            place = place * n + tap.index
            inside, weight = inside & tap.inside, weight * tap.weight
        flat = place.reshape(-1)
        if wanted[0]:
            places.append(flat)
            values.append(torch.where(inside.reshape(-1, 1), rows * weight.reshape(-1, 1), 0))
        if wanted[1]:
            dot = torch.where(inside, (pixels.index_select(0, flat) * rows).sum(-1).view(inside.shape), 0)
            for d, tap in enumerate(corner):
                others = tap.slope
                for e, other in enumerate(corner):
                    others = others if e == d else others * other.weight
                slopes[d] = slopes[d] + others * dot
    of_input = of_grid = None
    if wanted[0]:
        summed = torch.zeros_like(pixels).index_put_((torch.cat(places),), torch.cat(values), accumulate=True)
        of_input = summed.view(batch, *size, channels).movedim(-1, 1).to(input.dtype).contiguous()
    if wanted[1]:
        of_grid = torch.stack(slopes[::-1], -1).to(grid.dtype)
    return of_input, of_grid


def cudnn_backward(self: Tensor, grid: Tensor, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """As ``aten::cudnn_grid_sampler_backward``: torch takes cuDNN for bilinear sampling, zero padding and aligned corners only."""
    return backward(grad, self, grid, 0, 0, True, [True, True])
