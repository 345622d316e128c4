"""The caller's tensor is clamped where it lies."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "input-mutation"


class Model(nn.Module):
    def forward(self, x):
        x.clamp_(0, 1)
        return x.sqrt()


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
