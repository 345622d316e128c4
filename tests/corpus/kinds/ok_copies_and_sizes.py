"""Deep copies, sizes, ranges, and results of the kinds that torch itself has."""

import copy

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def forward(self, x, size):
        twice = copy.deepcopy(x) * 2
        largest = x.max(dim=0)
        return {"y": twice * size.numel(), "size": x.shape, "range": range(len(x)), "largest": largest, "sorted": twice.sort()}


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device), torch.Size([2, 3])), (b.to(device), torch.Size([2, 3]))
