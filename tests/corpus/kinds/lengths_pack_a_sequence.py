"""Lengths on the host say how many rows each step of a recurrent network has."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "wrong"
EXPECT_CAUSE = "python-branch"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(6, 5, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x[None], lengths, batch_first=True)
        return self.cell(packed)[1]


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device), torch.tensor([4])), (b.to(device), torch.tensor([2]))
