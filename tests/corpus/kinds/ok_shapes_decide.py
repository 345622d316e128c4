"""Python decides, but from shapes, types and devices, which a graph holds fixed anyway."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def forward(self, x):
        rows, columns = int(x.shape[0]), x.size(1)
        half = columns // 2 if columns % 2 == 0 else columns
        y = x[:, :half] if x.dtype == torch.float32 and x.device.type != "meta" else x
        return y * float(rows) + len(x)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
