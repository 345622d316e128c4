"""The end of a slice is a number that lies on the device."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "host-sync"


class Model(nn.Module):
    def forward(self, x, count):
        n = int(count)
        return x[:n].sum(dim=0)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device), torch.tensor(3).to(device)), (b.to(device), torch.tensor(2).to(device))
