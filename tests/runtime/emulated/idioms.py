"""Single idioms of model code, each with the cause for which a capture must refuse it (None: it may be captured).

Every idiom takes ``x``, a (4, 3) float tensor on the device, and ``kit``, what a model would hold. Their legality on an H200 is
recorded in tests/data/idioms_h200.jsonl under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.logging_tensor import capture_logs_with_logging_tensor_mode

MIXED = "RuntimeError"
"""Not a matter of graphs: a host operand beside a device operand is an error in eager too."""


@dataclass(frozen=True)
class Kit:
    """``host``: (4,) zeros on the host. ``pinned``: (1, 3). ``weight``: (3, 3). ``kernel``: (2, 4, 2), for conv1d."""

    host: Tensor
    pinned: Tensor
    attention: nn.Module
    recurrent: nn.Module
    encoder: nn.Module
    weight: Tensor
    kernel: Tensor


def make_kit() -> Kit:
    return Kit(
        host=torch.zeros(4),
        pinned=torch.arange(3.0).reshape(1, 3).pin_memory(),
        attention=nn.MultiheadAttention(3, 1, batch_first=True).eval().cuda(),
        recurrent=nn.LSTM(3, 3).cuda(),
        encoder=nn.TransformerEncoderLayer(3, 1, 4, batch_first=True).eval().cuda(),
        weight=torch.randn(3, 3, device="cuda"),
        kernel=torch.randn(2, 4, 2, device="cuda"),
    )


Function = Callable[[Tensor, Kit], Any]


@dataclass(frozen=True)
class Idiom:
    name: str
    cause: str | None
    run: Function


IDIOMS: dict[str, Idiom] = {}


def idiom(cause: str | None = None) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        name = function.__name__
        IDIOMS[name] = Idiom(name, cause, function)
        return function

    return register


# ---------------------------------------------------------------- the host asks for a value
@idiom("host-sync")
def item(x: Tensor, kit: Kit) -> Any:
    return x * x.sum().item()


@idiom("host-sync")
def boolean(x: Tensor, kit: Kit) -> Any:
    return x if x.sum() > 0 else -x


@idiom("host-sync")
def tolist(x: Tensor, kit: Kit) -> Any:
    return x, x.tolist()


@idiom("host-sync")
def int_(x: Tensor, kit: Kit) -> Any:
    return x * int(x[0, 0])


@idiom("host-sync")
def float_(x: Tensor, kit: Kit) -> Any:
    return x * float(x.max())


@idiom("host-sync")
def fmt(x: Tensor, kit: Kit) -> Any:
    return x, f"{x[0, 0]:.2f}"


@idiom("host-sync")
def print_(x: Tensor, kit: Kit) -> Any:
    return x, str(x)


@idiom("host-sync")
def index_(x: Tensor, kit: Kit) -> Any:
    return x, range(10)[x.argmax() % 3]


@idiom("host-sync")
def equal(x: Tensor, kit: Kit) -> Any:
    """Of two tensors. The H200's record of this name is ``torch.equal(x, x)``, which is legal; that one has a test of its own."""
    return x, torch.equal(x, x + 0)


@idiom("host-sync")
def allclose(x: Tensor, kit: Kit) -> Any:
    return x, torch.allclose(x, x)


@idiom("host-sync")
def one_hot(x: Tensor, kit: Kit) -> Any:
    return F.one_hot(x.argmax(1))


@idiom("host-sync")
def sync(x: Tensor, kit: Kit) -> Any:
    return x, torch.cuda.synchronize()


@idiom("host-sync")
def pinned_blocking(x: Tensor, kit: Kit) -> Any:
    return x + kit.pinned.to(x.device)[0]


# ---------------------------------------------------------------- from the device to the host
@idiom("d2h-copy")
def cpu(x: Tensor, kit: Kit) -> Any:
    return x.cpu()


@idiom("d2h-copy")
def to_cpu(x: Tensor, kit: Kit) -> Any:
    return x.to("cpu")


@idiom("d2h-copy")
def to_kw(x: Tensor, kit: Kit) -> Any:
    return x.to(device=torch.device("cpu"), dtype=torch.float64)


@idiom("d2h-copy")
def numpy(x: Tensor, kit: Kit) -> Any:
    return x.detach().numpy()


@idiom("d2h-copy")
def np_asarray(x: Tensor, kit: Kit) -> Any:
    return np.asarray(x)


@idiom("d2h-copy")
def h_copy(x: Tensor, kit: Kit) -> Any:
    return kit.host.copy_(x[:, 0])


# ---------------------------------------------------------------- shapes that depend on data
@idiom("data-dependent-shape")
def nonzero(x: Tensor, kit: Kit) -> Any:
    return (x > 0).nonzero()


@idiom("data-dependent-shape")
def mask(x: Tensor, kit: Kit) -> Any:
    return x[x > 0]


@idiom("data-dependent-shape")
def unique(x: Tensor, kit: Kit) -> Any:
    return torch.unique(x)


@idiom("data-dependent-shape")
def where1(x: Tensor, kit: Kit) -> Any:
    return torch.where(x > 0)


@idiom("data-dependent-shape")
def msel(x: Tensor, kit: Kit) -> Any:
    return torch.masked_select(x, x > 0)


@idiom("data-dependent-shape")
def ri(x: Tensor, kit: Kit) -> Any:
    return x.repeat_interleave(torch.ones(4, dtype=torch.long, device=x.device), 0)


@idiom("data-dependent-shape")
def bincount(x: Tensor, kit: Kit) -> Any:
    return torch.bincount((x.abs() * 3).long().flatten())


@idiom("data-dependent-shape")
def mask_put_dev(x: Tensor, kit: Kit) -> Any:
    return F.relu(x).index_put_((x > 0,), x[0, 0])


# ---------------------------------------------------------------- from the host to the device
@idiom("h2d-copy")
def tensor(x: Tensor, kit: Kit) -> Any:
    return x + torch.tensor([1.0, 2, 3], device=x.device)


@idiom("h2d-copy")
def tensor0(x: Tensor, kit: Kit) -> Any:
    return x + torch.tensor(2.0, device=x.device)


@idiom("h2d-copy")
def as_tensor(x: Tensor, kit: Kit) -> Any:
    return x + torch.as_tensor([1.0, 2, 3], device="cuda")


@idiom("h2d-copy")
def new_tensor(x: Tensor, kit: Kit) -> Any:
    return x + x.new_tensor([1.0, 2, 3])


@idiom("h2d-copy")
def default_dev(x: Tensor, kit: Kit) -> Any:
    with torch.device("cuda"):
        return x + torch.tensor([1.0, 2, 3])


@idiom("h2d-copy")
def arange_to(x: Tensor, kit: Kit) -> Any:
    return x + torch.arange(3).to(x.device)


@idiom("h2d-copy")
def arange_to2(x: Tensor, kit: Kit) -> Any:
    return x + torch.arange(3.0).to(x)


@idiom("h2d-copy")
def typeas(x: Tensor, kit: Kit) -> Any:
    return x + torch.arange(3.0).type_as(x)


@idiom("h2d-copy")
def cuda_(x: Tensor, kit: Kit) -> Any:
    return x + torch.ones(3).cuda()


@idiom("h2d-copy")
def list_index(x: Tensor, kit: Kit) -> Any:
    return x[[0, 2]]


@idiom("h2d-copy")
def host_index(x: Tensor, kit: Kit) -> Any:
    return x[torch.tensor([0, 1])]


@idiom("h2d-copy")
def np_index(x: Tensor, kit: Kit) -> Any:
    return x[np.array([0, 1])]


@idiom("h2d-copy")
def copy_host(x: Tensor, kit: Kit) -> Any:
    return x.clone().copy_(torch.ones(4, 3))


def _copies_numbers() -> bool:
    y = torch.zeros(1, 1)
    with capture_logs_with_logging_tensor_mode() as ops:
        y[0, 0] = 3.0
    return any("aten.copy_" in op for op in ops)


COPIES_NUMBERS = _copies_numbers()
"""Whether a number that is put into a tensor goes there as a host tensor (torch 2.11 to 2.14), or as the value of a fill (2.15)."""


@idiom("h2d-copy" if COPIES_NUMBERS else None)
def set_elem(x: Tensor, kit: Kit) -> Any:
    y = x.clone()
    y[0, 0] = 3.0
    return y


# ---------------------------------------------------------------- an error anywhere
@idiom(MIXED)
def mixed(x: Tensor, kit: Kit) -> Any:
    return x + torch.ones(3)


@idiom(MIXED)
def mixed_cat(x: Tensor, kit: Kit) -> Any:
    return torch.cat([x, torch.ones(1, 3)])


# ---------------------------------------------------------------- legal: factories and numbers
@idiom()
def arange(x: Tensor, kit: Kit) -> Any:
    return x + torch.arange(3, device=x.device)


@idiom()
def zeros(x: Tensor, kit: Kit) -> Any:
    return x + torch.zeros(3, device=x.device) + torch.full((3,), 2.0, device="cuda") + torch.linspace(0, 1, 3, device="cuda")


@idiom()
def new_zeros(x: Tensor, kit: Kit) -> Any:
    return x.new_zeros(3) + x + x.new_full((3,), 3.0)


@idiom()
def eye(x: Tensor, kit: Kit) -> Any:
    return x @ torch.eye(3, device=x.device)


@idiom()
def triu(x: Tensor, kit: Kit) -> Any:
    return x + torch.triu(torch.ones(4, 3, device=x.device))


@idiom()
def tril(x: Tensor, kit: Kit) -> Any:
    return x[torch.tril_indices(3, 3, device=x.device)[0]]


@idiom()
def meshgrid(x: Tensor, kit: Kit) -> Any:
    rows, columns = torch.arange(4, device="cuda"), torch.arange(3, device="cuda")
    return torch.meshgrid(rows, columns, indexing="ij")[0] + x


@idiom()
def scalar(x: Tensor, kit: Kit) -> Any:
    return x * 2 + 1


@idiom()
def host0(x: Tensor, kit: Kit) -> Any:
    return x * torch.tensor(2.0)


@idiom()
def pinned(x: Tensor, kit: Kit) -> Any:
    return x + kit.pinned.to(x.device, non_blocking=True)[0]


# ---------------------------------------------------------------- legal: indexing, masks, views, in place
@idiom()
def ri_sized(x: Tensor, kit: Kit) -> Any:
    return x.repeat_interleave(torch.ones(4, dtype=torch.long, device=x.device), 0, output_size=4)


@idiom()
def ri_int(x: Tensor, kit: Kit) -> Any:
    return x.repeat_interleave(2, 0)


@idiom()
def mask_set_scalar(x: Tensor, kit: Kit) -> Any:
    y = x + 1
    y[y > 1] = 0.0
    return y


@idiom()
def set_row(x: Tensor, kit: Kit) -> Any:
    y = x.clone()
    y[0] = 3.0
    return y


@idiom()
def checkpoint(x: Tensor, kit: Kit) -> Any:
    return x.masked_fill(x > 0, float("-inf")).softmax(1)


@idiom()
def one_hot_n(x: Tensor, kit: Kit) -> Any:
    return F.one_hot(torch.arange(3, device="cuda"), 5).float() + x[0, 0]


@idiom()
def inplace(x: Tensor, kit: Kit) -> Any:
    return x.clone().mul_(2).add_(1)[:, ::2]


@idiom()
def unsq(x: Tensor, kit: Kit) -> Any:
    y = x.clone()
    return y + 1, y.unsqueeze_(0), y * 2


@idiom()
def clamp(x: Tensor, kit: Kit) -> Any:
    return torch.clamp(x, min=torch.zeros(3, device="cuda"))


@idiom()
def bucket(x: Tensor, kit: Kit) -> Any:
    return torch.bucketize(x, torch.arange(3.0, device="cuda"))


@idiom()
def topk(x: Tensor, kit: Kit) -> Any:
    return x.topk(2, 1)


@idiom()
def sort(x: Tensor, kit: Kit) -> Any:
    return x.sort(1)


# ---------------------------------------------------------------- legal: random numbers
@idiom()
def rand(x: Tensor, kit: Kit) -> Any:
    return x + torch.rand(3, device=x.device) + torch.rand_like(x) + torch.empty_like(x).normal_() + F.dropout(x)


@idiom()
def randperm(x: Tensor, kit: Kit) -> Any:
    return x[torch.randperm(4, device=x.device)]


# ---------------------------------------------------------------- legal: networks
@idiom()
def interp(x: Tensor, kit: Kit) -> Any:
    return F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear")


@idiom()
def grid(x: Tensor, kit: Kit) -> Any:
    return F.grid_sample(x[None, None], torch.zeros(1, 2, 2, 2, device="cuda"), align_corners=False)


@idiom()
def sdpa(x: Tensor, kit: Kit) -> Any:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])


@idiom()
def mha(x: Tensor, kit: Kit) -> Any:
    return kit.attention(x[None], x[None], x[None])


@idiom()
def lstm(x: Tensor, kit: Kit) -> Any:
    return kit.recurrent(x)


@idiom()
def enc(x: Tensor, kit: Kit) -> Any:
    return kit.encoder(x[None])


@idiom()
def autocast(x: Tensor, kit: Kit) -> Any:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return F.linear(x, kit.weight)


@idiom()
def fft(x: Tensor, kit: Kit) -> Any:
    return torch.fft.rfft(x)


@idiom()
def einsum(x: Tensor, kit: Kit) -> Any:
    return torch.einsum("ij,kj->ik", x, x)


@idiom()
def cdist(x: Tensor, kit: Kit) -> Any:
    return torch.cdist(x, x)


@idiom()
def conv(x: Tensor, kit: Kit) -> Any:
    return F.conv1d(x[None], kit.kernel)


@idiom()
def stream(x: Tensor, kit: Kit) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    return y + 1
