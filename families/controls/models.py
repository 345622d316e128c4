"""The modules behind the controls. Every one takes a matrix ``x`` of batch x width."""

from __future__ import annotations

import itertools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6
_CALLS = itertools.count()


class Plain(nn.Module):
    """A base with an input layer that takes any width: columns are averaged into WIDTH features by position."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return self.mix(nn.functional.adaptive_avg_pool1d(x[:, None], WIDTH)[:, 0])

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.features(x))


class TinySignalOnHugeGrid(Plain):
    """Most leading digits never move: a relative threshold would call the output constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.arange(WIDTH) * 65536.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.grid + 0.25 * super().forward(x)


class NanAndMinusZero(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.features(x)
        return torch.log(y), -torch.relu(y), torch.copysign(torch.zeros_like(y), y)


class Views(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = super().forward(x)
        return y[:, ::2], y.t(), y[0].expand(5, WIDTH), y.flatten().unfold(0, 4, 2), y.view(-1)[3:]


Heads = namedtuple("Heads", ["box", "score"])


class NestedOutputs(Plain):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.features(x)
        return {"levels": [y, y * 2], "heads": Heads(y + 1, y.sigmoid()), "aux": None, "strides": (8, 16), "pair": (y.mean(), y.std())}


@dataclass
class Prediction:
    logits: Tensor
    boxes: list[Tensor]
    name: str


class DataclassOutput(Plain):
    def forward(self, x: Tensor) -> Prediction:
        y = self.features(x)
        return Prediction(y, [y * 2, y - 1], "plain")


class LazyDeviceCache(Plain):
    """Built by the first call on the device it is given, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.arange(WIDTH, device=x.device) / WIDTH
        return super().forward(x) + self.positions


class CachePerShape(Plain):
    """Like a one-entry cache, but with an entry for every shape."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.tables:
            self.tables[x.shape] = torch.linspace(0, 1, x.numel(), device=x.device).reshape(x.shape)
        return super().forward(x + self.tables[x.shape])


class StateInPlace(Plain):
    """A running mean that every call moves, in place, as a key/value cache or BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean.mul_(0.9).add_(y.mean(dim=0), alpha=0.1)
        self.calls.add_(1)
        return y - self.mean


class DrawsNoise(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.randn_like(y) + nn.functional.dropout(y, 0.5, training=True)


class PassesItsInputOn(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x[:, 2:5], super().forward(x)


class ZeroInitialisedHead(Plain):
    """Returns constants until its head is drawn anew, as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class IntegerOutputs(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.features(x)
        return y.argmax(dim=1), y > 0, (y > 0).sum(dim=1), y.half(), (y * 50).to(torch.uint8)


class JoinedSideStream(Plain):
    def forward(self, x: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            aside = x.sum(dim=1, keepdim=True)
        torch.cuda.current_stream().wait_stream(stream)
        return super().forward(x) + aside


class DrawnOutsideTheSeed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + next(_CALLS)


class IgnoresItsInput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix.bias + x.new_zeros(x.shape[0], WIDTH)


class ReadsAValue(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class CopiesToTheHost(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.cpu()


class BuildsALiteral(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device)


class CountsPositives(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y[y > 0].mean()


class LeavesAStream(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.load.copy_(y.mean(dim=0))
        return y


class CountsItsCalls(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class FeedsItsOutputBack(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.last is not None:
            y = 0.5 * y + 0.5 * self.last
        self.last = y
        return y


class ReplacesItsTable(Plain):
    """The table is large, so that no small allocation lands in its block by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.full((16 * 2**20,), 0.5, device=x.device)
        y = super().forward(x) + self.table[:WIDTH]
        self.table = self.table.clone()
        return y


class OneEntryCache(Plain):
    entries = 1

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.shape != tuple(x.shape):
            self.shape, self.table = tuple(x.shape), torch.full((self.entries, *x.shape), 0.5, device=x.device)
        return super().forward(x + self.table[0])


class OneEntryCache64MB(OneEntryCache):
    """A block of its own segment: once freed, the next capture gives the segment back to the driver, and reading it would be fatal."""

    entries = 2 * 2**20


class CachesScaledWeights(Plain):
    """Renews its cache whenever the weights changed, which eager notices and a graph does not."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: tuple[int, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        version = self.mix.bias._version
        if self.cached is None or self.cached[0] != version:
            self.cached = (version, self.mix.bias.detach() * 3)
        return super().forward(x) + self.cached[1]


class WritesToItsInput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0))


class CachesDuringCapture(Plain):
    """Eager never fills the cache, and uses it where it finds one."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        offsets = self.cache
        if offsets is None:
            offsets = torch.arange(WIDTH, device=x.device) * 0.5
            if torch.cuda.is_current_stream_capturing():
                self.cache = offsets
        return super().forward(x) + offsets
