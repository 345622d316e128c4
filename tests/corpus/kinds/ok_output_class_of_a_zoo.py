"""What comes back is a dict of its own kind, with an attribute beside its items, as zoos define for outputs."""

from collections import OrderedDict

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Output(OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        logits = self.linear(x)
        return Output(logits=logits, hidden=(x * 2, logits.exp()))


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
