"""A range check of the kind that assertions make: comparing in Python reads the device."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "host-sync"


class Model(nn.Module):
    def forward(self, x):
        if not (x.min() > -100 and x.max() < 100):
            raise ValueError("out of range")
        return x.sigmoid()


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
