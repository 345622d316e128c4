"""A draw from a distribution: whether it is one is asserted on the device, and the generator moves with each replay."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "screened"
EXPECT_CAUSE = ""


class Model(nn.Module):
    def forward(self, x):
        chosen = torch.distributions.Categorical(logits=x, validate_args=False).sample()
        return x.gather(1, chosen[:, None])


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
