"""Sequences are packed and padded again, always by the same lengths."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(6, 5, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x.view(2, 2, 6), torch.tensor([2, 1]), batch_first=True)
        y, last = self.cell(packed)
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0], last


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
