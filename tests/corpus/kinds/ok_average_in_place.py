"""A moving average is updated in place, by the device."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        self.average.lerp_(x.mean(dim=0), 0.1)
        return x - self.average


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
