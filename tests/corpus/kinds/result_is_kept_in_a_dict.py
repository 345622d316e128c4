"""What is returned is also kept, and mixed into the next result."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "output-aliasing"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = {}

    def forward(self, x):
        mixed = x + 0.5 * self.memory["last"] if "last" in self.memory else x * 1.0
        self.memory["last"] = mixed
        return {"mixed": mixed}


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
