"""A mask per size is kept in a dict, every one of them."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        size = x.shape[-1]
        if size not in self.masks:
            self.masks[size] = torch.ones(4, size, device=x.device, dtype=torch.bool).tril()
        return x.masked_fill(~self.masks[size], -1.0)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
