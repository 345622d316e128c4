"""The networks behind the training controls. Each takes a matrix of batch x WIDTH."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6
_CALLS = itertools.count()


class Net(nn.Module):
    """What a step moves: weights, running statistics. No random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = torch.tanh(self.norm(self.mix(x)))
        return features

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class Drops(Net):
    """Draws from the device's generator."""

    def features(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().features(x), 0.3, self.training)


class Masks(Net):
    """Draws from a generator that it may be given; else from the default one."""

    generator: Any = None

    def features(self, x: Tensor) -> Tensor:
        found = super().features(x)
        return found * (torch.rand(found.shape, device=found.device, generator=self.generator) > 0.3)


class TwoHeads(Net):
    """The loss knows the first one only."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.head(features), self.side(features)


class Reports(Net):
    """A second output that nobody differentiates."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.head(features), features.detach().square().mean(1)


class LeavesATerm(Net):
    """Part of its loss is not returned, but left on the module."""

    term: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        self.term = features.detach().abs().mean()
        out: Tensor = self.head(features)
        return out


class SharedHead(Net):
    """One weight used three times: cast once, its gradients add up in half precision; cast each time, in single."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(self.mix(x))
        found = []
        for _ in range(3):
            y = torch.relu(self.shared(y)) + 0.5
            found.append(self.head(y))
        return tuple(found)


class SharedHeadAtRest(SharedHead):
    """The same behind a factor that starts at zero, so that the first step gives the shared weight no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.gain * out for out in super().forward(x))


class Island(Net):
    """A layer kept in single precision within autocast: its backward inside autocast is not."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.mix(x))
        with torch.autocast("cuda", enabled=False):
            out: Tensor = self.head(y.float())
        return out


class _ByLayout(torch.autograd.Function):
    """Its backward adds ``ulps`` to what arrives transposed, as a reduction in another order might."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ulps: int) -> Tensor:
        ctx.ulps = ulps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if not grad.is_contiguous():
            grad = _raised(grad.contiguous(), ctx.ulps)
        return grad, None


def _raised(values: Tensor, ulps: int) -> Tensor:
    """``ulps`` representable numbers further from zero: of float32, whose bits are counted as integers."""
    return (values.view(torch.int32) + ulps).view(torch.float32)


class MindsLayout(Net):
    """A second output, of a weight alone, whose gradient depends on how it is laid out when it arrives."""

    ulps = 1

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.features(x)), _ByLayout.apply(self.offset, self.ulps)


class MindsLayoutMuch(MindsLayout):
    ulps = 64


class _Planted(torch.autograd.Function):
    """Passes on. The backward multiplies by what the process, or the capture, makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor(), None


def _noise() -> float:
    return 1.0 + 2.0**-20 * (next(_CALLS) % 3)


def _curable_noise() -> float:
    return 1.0 if torch.are_deterministic_algorithms_enabled() else _noise()


def _other_kernel() -> float:
    usual = torch.are_deterministic_algorithms_enabled() or not torch.cuda.is_current_stream_capturing()
    return 1.0 if usual else 1.0 + 2.0**-20


class Noisy(Net):
    """Differs from run to run, unless deterministic algorithms are asked for. The ``index_add`` is what such noise comes from."""

    factor = staticmethod(_curable_noise)

    def features(self, x: Tensor) -> Tensor:
        found = super().features(x)
        rows = torch.arange(len(found), device=found.device) % 2
        pooled = torch.zeros_like(found[:2]).index_add(0, rows, found)
        return _Planted.apply(found + pooled[rows], self.factor)  # type: ignore[no-any-return]


class NoisyLater(Noisy):
    """As noisy, once its weights have moved: one step from the first ones is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", self.head.weight.detach().clone())

    def factor(self) -> float:  # type: ignore[override]
        if torch.cuda.is_current_stream_capturing() or torch.equal(self.head.weight, self.first):
            return 1.0
        return _curable_noise()


class IncurablyNoisy(Net):
    """Differs from run to run, whatever is asked for."""

    def features(self, x: Tensor) -> Tensor:
        return _Planted.apply(super().features(x), _noise)  # type: ignore[no-any-return]


class OtherKernel(Net):
    """Always the same, but another kernel is picked while a graph is captured."""

    def features(self, x: Tensor) -> Tensor:
        return _Planted.apply(super().features(x), _other_kernel)  # type: ignore[no-any-return]


class SamplesAGrid(nn.Module):
    """``grid_sample``, whose backward on a GPU adds in any order, and which has no deterministic version."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 8, 3, padding=1)
        self.offsets = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        plane = self.image(x.reshape(-1, 1, WIDTH, 1).expand(-1, -1, -1, WIDTH).contiguous())
        plane = nn.functional.interpolate(plane, size=(48, 48))
        grid = torch.tanh(self.offsets(plane)).permute(0, 2, 3, 1)
        return nn.functional.grid_sample(plane, grid, align_corners=False)


class ReadsAValue(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out * 2 if float(out.detach().sum()) > 1e6 else out


class BecomesNan(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-self.head(self.features(x)).square() - 1)
