"""Coordinates are made where torch puts things by default: on the host."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "h2d-copy"


class Model(nn.Module):
    def forward(self, x):
        ramp = torch.linspace(0, 1, x.shape[-1])
        return x + ramp.to(device=x.device, dtype=x.dtype)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
