"""A dict of the module holds how far a schedule has come."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-counter"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.schedule = {"step": 0, "warm": 4}

    def forward(self, x):
        self.schedule["step"] += 1
        ramp = min(self.schedule["step"] / self.schedule["warm"], 1.0) + self.schedule["step"]
        return torch.add(x, x, alpha=ramp)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
