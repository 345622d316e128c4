"""A number is formatted into the key of a table: formatting a tensor reads it."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "host-sync"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gains = {"low": 0.5, "high": 2.0}

    def forward(self, x):
        name = f"{x.mean():.1f}"
        return x * self.gains["low" if name < "1.0" else "high"]


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
