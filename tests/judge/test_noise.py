"""Noisy ops are named, with their submodule and their line; quiet ones are not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.judge.counterfactual.conditions import CONDITIONS
from parity.judge.counterfactual.noise import _TABLE, REMEDIES, NoisyOp, alerts, noisy_ops
from parity.judge.counterfactual.substitutes import SUBSTITUTES
from parity.runtime.emulated import device

HERE = Path(__file__).read_text().splitlines()


class Sampler(nn.Module):
    broken = False

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("broken")
        return F.grid_sample(x, grid, align_corners=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList([Sampler(), Sampler()])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = F.interpolate(x, (8, 8), mode="bicubic", antialias=True)
        grid = torch.zeros(x.shape[0], 4, 4, 2, device=x.device)
        return self.blocks[1](x, grid)


def step(net: nn.Module, x: Tensor) -> None:
    out = net(x)
    F.cross_entropy(out, torch.zeros(out.shape[0], *out.shape[2:], dtype=torch.int64, device=out.device)).backward()


def named(found: list[NoisyOp]) -> list[tuple[str, str]]:
    return [(o.op, o.module) for o in found]


EXPECTED = [("convolution", "stem"), ("interpolate", ""), ("grid_sample", "blocks.1"), ("nll_loss", "")]


def test_ops_are_named_with_their_submodule_line_and_remedy() -> None:
    net = Net()
    found = noisy_ops(lambda: step(net, torch.randn(2, 3, 6, 6)), net)
    assert named(found) == EXPECTED
    sampler = found[2]
    line, _, code = sampler.where.partition(" ")
    assert line.split(":")[0].endswith("tests/judge/test_noise.py")
    assert HERE[int(line.split(":")[1]) - 1].strip() == code == "return F.grid_sample(x, grid, align_corners=False)"
    assert sampler.remedies == ("substitute:grid_sample",)
    assert found[0].remedies == ("cudnn-deterministic", "deterministic-algorithms")


def test_the_emulated_device_is_looked_through() -> None:
    with device():
        net = Net().cuda()
        assert named(noisy_ops(lambda: step(net, torch.randn(2, 3, 6, 6, device="cuda")), net)) == EXPECTED


def test_a_backward_that_will_not_run_is_not_noisy() -> None:
    net = Net()
    with torch.no_grad():
        assert noisy_ops(lambda: net(torch.randn(2, 3, 6, 6)), net) == []
    net.requires_grad_(False)
    assert noisy_ops(lambda: net(torch.randn(2, 3, 6, 6)), net) == []


def test_a_failing_step_leaves_no_hook_and_no_place_behind() -> None:
    net = Net()
    net.blocks[1].broken = True

    def run() -> None:
        with pytest.raises(RuntimeError, match="broken"):
            net(torch.randn(2, 3, 6, 6))
        weight = torch.ones(1, 1, 1, 1, requires_grad=True)
        F.conv2d(torch.ones(1, 1, 2, 2), weight)

    assert named(noisy_ops(run, net)) == [("convolution", "stem"), ("interpolate", ""), ("convolution", "")]
    hooks = nn.modules.module
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    with pytest.raises(RuntimeError, match="broken"):
        noisy_ops(lambda: net(torch.randn(2, 3, 6, 6)), net)
    assert not hooks._global_forward_hooks


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


INDEX = torch.zeros(4, dtype=torch.int64)
CALLS: dict[str, Any] = {
    "adaptive_avg_pool": lambda: F.adaptive_avg_pool2d(leaf(1, 2, 5, 5), 2),
    "adaptive_max_pool": lambda: F.adaptive_max_pool2d(leaf(1, 2, 5, 5), 2),
    "fractional_max_pool": lambda: F.fractional_max_pool2d(leaf(1, 2, 5, 5), 2, output_size=2),
    "reflection_pad": lambda: F.pad(leaf(1, 2, 5, 5), (1, 1, 1, 1), mode="reflect"),
    "replication_pad": lambda: F.pad(leaf(1, 2, 5, 5), (1, 1, 1, 1), mode="replicate"),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*[leaf(1, 1, 4, 8)] * 3),
    "embedding": lambda: F.embedding(INDEX, leaf(5, 2)),
    "gather": lambda: leaf(4, 2).gather(0, INDEX.view(4, 1)),
    "index_select": lambda: leaf(4, 2).index_select(0, INDEX),
    "scatter_add": lambda: torch.zeros(4).scatter_add_(0, INDEX, torch.ones(4)),
    "index_add": lambda: torch.zeros(4).index_add(0, INDEX, torch.ones(4)),
    "index_put": lambda: torch.zeros(4).index_put((INDEX,), torch.randn(4)),
    "cumsum": lambda: torch.ones(4).cumsum(0),
    "avg_pool3d": lambda: F.avg_pool3d(leaf(1, 1, 4, 4, 4), 2),
    "interpolate": lambda: F.interpolate(leaf(1, 2, 4), 7, mode="linear"),
    "nll_loss": lambda: F.nll_loss(torch.randn(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64)),
}


@pytest.mark.parametrize("op", CALLS)
def test_each_noisy_op_is_known_by_its_public_name(op: str) -> None:
    assert [o.op for o in noisy_ops(CALLS[op], nn.Identity())] == [op]


QUIET: dict[str, Any] = {
    "sums of integers": lambda: torch.ones(4, dtype=torch.int64).cumsum(0),
    "additions that CUDA sorts": lambda: torch.zeros(4).index_put((INDEX,), torch.randn(4), accumulate=True),
    "a mask": lambda: torch.zeros(4).index_put((torch.tensor([True, False, True, False]),), torch.randn(2)),
    "one value for all": lambda: torch.zeros(4).index_put((INDEX,), torch.tensor(1.0)),
    "a loss per pixel": lambda: F.nll_loss(torch.randn(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64), reduction="none"),
    "a loss per image": lambda: F.cross_entropy(leaf(4, 3), INDEX),
    "nearest": lambda: F.interpolate(leaf(1, 2, 4, 4), 7),
    "pooling to one": lambda: F.adaptive_avg_pool2d(leaf(1, 2, 5, 5), 1),
    "products": lambda: F.linear(leaf(2, 4), leaf(3, 4)),
}


@pytest.mark.parametrize("what", QUIET)
def test_quiet_ops_are_not_named(what: str) -> None:
    assert noisy_ops(QUIET[what], nn.Identity()) == []


def test_the_table_speaks_of_ops_and_conditions_that_exist() -> None:
    newer = {"aten::_upsample_lanczos2d_aa"}
    for name in _TABLE:
        space, _, op = name.partition("::")
        assert space == "torchvision" or name in newer or hasattr(torch.ops.aten, op), name
    assert {c.name for c in CONDITIONS} >= REMEDIES
    assert {f"substitute:{s.name}" for s in SUBSTITUTES} <= REMEDIES


def test_what_torch_itself_says_is_heard_once_and_in_order() -> None:
    def run() -> None:
        for name in ("roi_align_backward_kernel", "put_", "roi_align_backward_kernel"):
            warnings.warn(f"{name} does not have a deterministic implementation, but you set", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    assert alerts(run) == ("roi_align_backward_kernel", "put_")
    assert not torch.are_deterministic_algorithms_enabled()


def test_alerts_are_asked_for_under_deterministic_algorithms() -> None:
    seen: list[bool] = []
    assert alerts(lambda: seen.append(torch.are_deterministic_algorithms_enabled())) == ()
    assert seen == [True]
