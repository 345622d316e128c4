"""Operators of the model's own, for any device and for CUDA alone, one of which writes to what it is given."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


@torch.library.custom_op("parity_kinds::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by + x.sum()


@torch.library.custom_op("parity_kinds::added", mutates_args=("total",), device_types="cuda")
def added(total: torch.Tensor, x: torch.Tensor) -> None:
    total += torch.ones(x.shape, device=x.device) * x


class Model(nn.Module):
    def forward(self, x):
        total = torch.zeros_like(x)
        added(total, scaled(x, 2.0))
        return total


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
