"""A word chooses between heads of one shape."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-branch"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"boxes": nn.Linear(6, 4), "points": nn.Linear(6, 4)})

    def forward(self, x, task):
        return self.heads[task](x)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device), "boxes"), (b.to(device), "points")
