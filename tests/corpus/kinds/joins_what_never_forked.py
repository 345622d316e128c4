"""The main stream waits for a side stream that never waited for it."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "side-stream"


class Model(nn.Module):
    def forward(self, x):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = x.exp()
        torch.cuda.current_stream().wait_stream(side)
        return y * 2


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
