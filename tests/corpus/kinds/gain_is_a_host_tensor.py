"""A number comes as a tensor on the host: its value is read when the kernel is launched."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "stale-constant"


class Model(nn.Module):
    def forward(self, x, gain):
        return x.exp() * gain


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device), torch.tensor(0.25)), (b.to(device), torch.tensor(4.0))
