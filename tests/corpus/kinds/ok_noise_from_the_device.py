"""Noise and dropout are drawn by the device's own generator."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def forward(self, x):
        noisy = x + 0.1 * torch.randn_like(x)
        return nn.functional.dropout(noisy, 0.5, training=True)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
