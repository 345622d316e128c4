"""The caller's list is shorter after the call."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "input-mutation"


class Model(nn.Module):
    def forward(self, levels):
        top = levels.pop()
        return top * levels[0]


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return ([a.to(device), a.to(device) + 1],), ([b.to(device), b.to(device) * 2],)
