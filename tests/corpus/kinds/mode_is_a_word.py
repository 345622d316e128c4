"""A word among the arguments chooses what is computed."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-branch"


class Model(nn.Module):
    def forward(self, x, pooling):
        return x.amax(dim=0) if pooling == "max" else x.mean(dim=0)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device), "max"), (b.to(device), "mean")
