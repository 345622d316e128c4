"""Anchor sizes are Python numbers and become a tensor in every forward."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "h2d-copy"


class Model(nn.Module):
    anchors = ((1.0, 2.0, 1.0), (0.5, 0.5, 2.0))

    def forward(self, x):
        sizes = x.new_tensor(self.anchors)
        return x @ sizes.repeat(2, 1).t().repeat(2, 1)[:6, :4]


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
