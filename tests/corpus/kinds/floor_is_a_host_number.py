"""The other arm of a choice is a tensor without dimensions, on the host: it is moved to the device."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "h2d-copy"


class Model(nn.Module):
    def forward(self, x):
        return torch.where(x > 0.5, x, torch.tensor(-1e9))


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
