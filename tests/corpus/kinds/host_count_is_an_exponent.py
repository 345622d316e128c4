"""A count in a host tensor is read, and becomes a number of a kernel."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "host-state"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = [torch.zeros((), dtype=torch.long)]

    def forward(self, x):
        self.seen[0].add_(1)
        return x ** self.seen[0].item()


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
