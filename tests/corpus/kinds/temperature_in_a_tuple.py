"""A number travels beside the tensor and becomes the argument of a kernel."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "stale-constant"


class Model(nn.Module):
    def forward(self, x, options):
        temperature, scale = options
        return torch.softmax(x / temperature, dim=-1) * scale


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device), (0.5, 1.0)), (b.to(device), (1.5, 1.0))
