"""A window is computed by NumPy and moved to the device each time."""

import numpy as np
import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "h2d-copy"


class Model(nn.Module):
    def forward(self, x):
        window = torch.from_numpy(np.hanning(x.shape[-1]).astype("float32"))
        return x * window.to(x.device)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
