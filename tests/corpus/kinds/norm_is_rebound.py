"""A buffer that nobody reads gets a new tensor per call."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "buffer-drift"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("norm", torch.zeros(()))

    def forward(self, x):
        self.norm = x.norm()
        return x * 2


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
