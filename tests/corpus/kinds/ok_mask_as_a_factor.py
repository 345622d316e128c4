"""A boolean mask that is multiplied with, filled by one number, and given to where."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def forward(self, x):
        mask = x > 0.5
        y = torch.where(mask, x, x * 0.1)
        y[mask] = 2.0
        return y * mask


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
