"""Rows chosen by a mask get the rows of another tensor."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "data-dependent-shape"


class Model(nn.Module):
    def forward(self, x):
        mask = x.mean(dim=-1) > 0.6
        y = x.clone()
        y[mask] = x.flip(0)[mask] * 2
        return y


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
