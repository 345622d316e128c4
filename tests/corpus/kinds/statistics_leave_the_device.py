"""Statistics are handed out as a host tensor beside the result."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "d2h-copy"


class Model(nn.Module):
    def forward(self, x):
        spread = x.std(dim=-1)
        return x / spread[:, None], spread.to("cpu")


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
