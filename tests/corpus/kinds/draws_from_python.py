"""Noise that Python draws becomes the argument of a kernel."""

import random

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-counter"


class Model(nn.Module):
    def forward(self, x):
        return x * (1 + random.random())


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
