"""Whether values are among many others is found by sorting out those that are there twice."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "data-dependent-shape"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("special", torch.arange(60) * 2)

    def forward(self, x):
        return x.masked_fill(torch.isin((x * 10).long(), self.special), 0.0)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
