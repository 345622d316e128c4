"""A list of the file grows by an entry per call, and its length goes into the result."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-counter"

SEEN = []


class Model(nn.Module):
    def forward(self, x):
        SEEN.append(tuple(x.shape))
        return x + len(SEEN)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
