"""A host tensor of the module, no buffer, is updated by every call and multiplied with."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "host-state"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x):
        self.seen += 1
        return x * self.seen


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
