"""Attention drops what is padding, and to know its sizes it asks the device."""

import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")

MODE = "inference"
EXPECT = "uncapturable"
EXPECT_CAUSE = "host-sync"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        padding = torch.arange(len(x), device=x.device) > x.argmax()
        return self.encoder(x[None], src_key_padding_mask=padding[None])


def build():
    torch.manual_seed(1)
    return Model()


def probes(device):
    g = torch.Generator().manual_seed(2)
    a, b = torch.rand(4, 6, generator=g), torch.randn(4, 6, generator=g) * 3 + 2
    return (a.to(device),), (b.to(device),)
