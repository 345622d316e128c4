"""One call in two takes another path, whatever its input."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-counter"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.refresh = True

    def forward(self, x):
        self.refresh = not self.refresh
        return x.cumsum(dim=0) if self.refresh else x.cumsum(dim=1)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
