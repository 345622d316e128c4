"""Numbers of Python's in where, masked_fill and histc: no value is read."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def forward(self, x):
        low = torch.where(x > 0.5, x, 0.0)
        return low, x.masked_fill(x > 0.5, torch.tensor(3.0)), torch.where(x > 0.5, 1.0, 0.0), torch.histc(x, 4, 0, 1)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
