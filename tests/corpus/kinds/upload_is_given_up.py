"""Where a table cannot be uploaded the model goes on without it: under capture it never can."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "h2d-copy"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = [torch.linspace(0, 1, 6)]

    def forward(self, x):
        try:
            table = self.tables[0].to(x.device)
        except RuntimeError:
            table = 0.0
        return x + table


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
