"""What a step does to weights and buffers themselves, and captures that are due where none can be made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.runtime.emulated import device

from .steps import Small, both, plainly


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with device():
        yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- weights that the step itself writes to
class Decaying(Small):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.conv.weight.data.mul_(0.9)
        return super().forward(x)


class Clamping(Small):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.conv.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Normalising(Small):
    """Spectral, by one step of the power iteration per forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.randn(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            flat = self.conv.weight.flatten(1)
            v = nn.functional.normalize(flat.t() @ self.u, dim=0)
            self.u.copy_(nn.functional.normalize(flat @ v, dim=0))
            self.conv.weight.data.div_(self.u @ flat @ v)
        return super().forward(x)


class _Pulling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.weight.mul_(0.9)
        return grad, None


class Pulling(Small):
    """A weight is written to by the backward."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = super().forward(x)
        return {**out, "box": _Pulling.apply(out["box"], self.conv.weight.data)}


@pytest.mark.parametrize("kind", [Decaying, Clamping, Normalising, Pulling], ids=lambda k: k.__name__)
def test_a_step_that_writes_to_a_weight_that_it_trains(kind: type[nn.Module]) -> None:
    different, graphs, lines = both(kind, plainly)
    assert different == []
    assert graphs.captures == 0
    assert len(lines) == 1
    assert "writes to parameter conv.weight" in lines[0]
