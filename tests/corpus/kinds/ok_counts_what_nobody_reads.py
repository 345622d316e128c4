"""Calls are counted and logged in Python; no kernel ever hears of it."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.shapes = 0, []

    def forward(self, x):
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        return x.softmax(dim=-1)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
