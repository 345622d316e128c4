"""The side stream waits for the main one by an event; nobody waits for the side stream."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "side-stream"


class Model(nn.Module):
    def forward(self, x):
        start, side = torch.cuda.Event(), torch.cuda.Stream()
        start.record()
        side.wait_event(start)
        with torch.cuda.stream(side):
            energy = (x * x).sum(dim=-1)
        return x.tanh(), energy


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
