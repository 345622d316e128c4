"""The places of peaks are looked for: how many there are, only the values know."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "data-dependent-shape"


class Model(nn.Module):
    def forward(self, x):
        rows, columns = (x > 0.5).nonzero(as_tuple=True)
        return torch.stack([rows.float().mean(), columns.float().mean()])


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
