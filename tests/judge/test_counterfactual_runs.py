"""Whole searches: two arms of a small step that differ by one mechanism, conditions really applied, cause and class found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parity.judge.counterfactual.conditions import EagerTwist, applicable, applied, traits, twist
from parity.judge.counterfactual.noise import noisy_ops
from parity.judge.counterfactual.search import Search, class_of, search
from parity.judge.counterfactual.substitutes import _ACTIVE
from parity.judge.train.seam import Seam
from parity.runtime.state import same_bits


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class SharedHead(nn.Module):
    """One head for three levels: with autocast's weight cache its gradients add up in bfloat16, without it in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.head(F.avg_pool2d(x, n)).float().flatten(1) for n in (1, 2, 4)], 1)


class FullPrecisionPart(nn.Module):
    """A product kept in float32: a backward inside autocast computes it in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.stem(x).float().mean((2, 3))
        with torch.autocast("cpu", enabled=False):
            return self.gate(pooled)


class Bias(nn.Module):
    """A sum over everything but channels, whose order follows the strides in which the gradient arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(7, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, 4)) + self.bias


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.aim = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return F.grid_sample(x, torch.tanh(self.aim(x)).permute(0, 2, 3, 1), align_corners=False)


class Noisy(TorchDispatchMode):
    """A device whose sampling backward gives other last bits each time, unless something else computes it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.grid_sampler_2d_backward.default and not _ACTIVE["grid_sample"]:
            return tuple(t * (1 + 1e-6 * torch.rand_like(t)) for t in made)
        return made


def take(network: nn.Module, does: EagerTwist, autocast: bool) -> list[Tensor]:
    """Gradients of one step. The loss hands its gradient over with the strides of a transposed tensor."""
    network.zero_grad()
    x = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1))
    mixed = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast, cache_enabled=does.autocast_cache)
    seam = Seam()
    with mixed():
        out = network(x)
        if does.incoming_layout:
            layout = torch.empty_like(out)
            out.register_hook(lambda grad: layout.copy_(grad))
        if does.backward_inside_autocast:
            out = seam.cut(out)
        turned = out.movedim(1, -1)
        loss = (turned * torch.randn(turned.shape, generator=torch.Generator().manual_seed(2))).sum()
    loss.backward()
    with mixed():
        seam.backward()
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def searched(network: nn.Module, captured: EagerTwist, autocast: bool) -> Search:
    """``captured``: what the other arm does always."""

    def agree(names: frozenset[str]) -> int:
        with applied(names):
            eager, other = take(network, twist(names), autocast), take(network, captured, autocast)
        return sum(not same_bits(a, b) for a, b in zip(eager, other, strict=True))

    seen = noisy_ops(lambda: take(network, EagerTwist(), autocast), network)
    has = traits(autocast=autocast, random=False, cuda=False, remedies=[r for op in seen for r in op.remedies])
    return search(agree, applicable(has), budget=50)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("build", [SharedHead, FullPrecisionPart, Bias, Sampled])
def test_a_capture_that_does_as_eager_does_is_exact(build: Callable[[], nn.Module], autocast: bool) -> None:
    torch.manual_seed(0)
    found = searched(build(), EagerTwist(), autocast)
    assert class_of(found.proof, eager_is_stable=True, max_ulp=0) == ("exact", "")
    assert len(found.tried) == 1


@pytest.mark.parametrize(
    ("build", "captured", "autocast", "condition", "cause"),
    [
        (SharedHead, EagerTwist(autocast_cache=False), True, "autocast-cache-off", "autocast-cache"),
        (FullPrecisionPart, EagerTwist(backward_inside_autocast=True), True, "backward-inside-autocast", "autocast-backward"),
        (Bias, EagerTwist(incoming_layout=True), False, "incoming-layout-of-outputs", "grad-layout"),
    ],
)
def test_what_a_capture_does_otherwise_is_found(
    build: Callable[[], nn.Module], captured: EagerTwist, autocast: bool, condition: str, cause: str
) -> None:
    torch.manual_seed(0)
    found = searched(build(), captured, autocast)
    assert found.tried[0].differing > 0
    assert found.proof is not None
    assert found.proof.conditions == (condition,)
    assert class_of(found.proof, eager_is_stable=True, max_ulp=9) == ("float_rounding", cause)


def test_a_noisy_kernel_is_found_and_named() -> None:
    torch.manual_seed(0)
    network = Sampled()
    with Noisy():
        found = searched(network, EagerTwist(), False)
    assert found.proof is not None
    assert found.proof.conditions == ("substitute:grid_sample",)
    assert class_of(found.proof, eager_is_stable=False, max_ulp=9) == ("eager_noise", "nondeterministic-kernel")
    named = noisy_ops(lambda: take(network, EagerTwist(), False), network)
    assert [op.op for op in named if set(op.remedies) & set(found.proof.conditions)] == ["grid_sample"]


def test_a_difference_that_no_condition_explains_stays_unproven() -> None:
    """A capture that doubles a gradient is wrong, and no condition may excuse it."""
    torch.manual_seed(0)
    network = Sampled()

    def agree(names: frozenset[str]) -> int:
        with applied(names):
            eager, other = take(network, twist(names), False), take(network, EagerTwist(), False)
        return sum(not same_bits(a, b * 2) for a, b in zip(eager, other, strict=True))

    found = search(agree, applicable(traits(autocast=True, random=True, cuda=True, remedies=["math-sdpa"])), budget=50)
    assert found.proof is None
    assert not found.cut
    assert class_of(found.proof, eager_is_stable=True, max_ulp=9) == ("", "")
    assert {t.differing for t in found.tried} == {4}
