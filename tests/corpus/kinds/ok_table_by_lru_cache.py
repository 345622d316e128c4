"""A table per size is made on the device and kept for good."""

import functools

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


@functools.cache
def table(size, device):
    return torch.arange(size, device=device).float().cos()


class Model(nn.Module):
    def forward(self, x):
        return x * table(x.shape[-1], x.device)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
