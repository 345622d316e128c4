"""Complex numbers, NaN, minus zero, nothing, no dimensions, views of the input, and one tensor twice."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def forward(self, x):
        z, y = torch.fft.rfft2(x), x.exp()
        odd = {"conj": z.conj(), "nan": (x - 0.5).log(), "zero": -torch.zeros_like(x), "none": x[:0], "sum": x.sum()}
        return odd, x.t(), x.expand(2, 4, 6), y, [y, y.view(-1)], (y > 1).all()


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
