"""Lengths are a list of Python's: slices have another length for the next input."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-branch"


class Model(nn.Module):
    def forward(self, x, lengths):
        return torch.stack([part.sum(dim=0) for part in x.split(lengths)])


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device), [1, 3]), (b.to(device), [2, 2])
