"""Part of the work goes to the default stream, which no capture records."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "side-stream"


class Model(nn.Module):
    def forward(self, x):
        with torch.cuda.stream(torch.cuda.default_stream()):
            y = x * 2
        return y + 1


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
