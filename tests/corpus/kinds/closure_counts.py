"""A step is counted in a closure, out of sight of whoever looks at the module."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-counter"


def decay():
    step = 0

    def factor():
        nonlocal step
        step += 1
        return 1.0 / step

    return factor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = decay()

    def forward(self, x):
        return x * self.factor()


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
