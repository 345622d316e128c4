"""An operator of the model's own has a body of Python's, and that reads a value."""

import torch
from torch import nn

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "host-sync"


@torch.library.custom_op("parity_kinds::own_operator_reads", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x.roll(int(x.argmax()))


class Model(nn.Module):
    def forward(self, x):
        return shifted(x)


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
