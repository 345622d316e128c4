"""Random numbers that no generator decides: the counterfactual for an arm that draws from a stream of its own.

Under it every draw is a fixed sequence of its length. An arm that then has eager's bits differs in nothing but the numbers drawn, which
no alignment of generators could show. Not covered: kernels that draw inside themselves (fused attention with dropout, ``rrelu``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from parity.judge.counterfactual import conditions
from parity.judge.counterfactual.conditions import EagerTwist

FIXED: Final = "draws-fixed"
_GOLDEN: Final = 0.6180339887498949


def _sequence(like: Tensor) -> Tensor:
    """Multiples of the golden ratio modulo 1, which fill the unit interval evenly; float32, shaped like ``like``."""
    ones = torch.ones_like(like, dtype=torch.float64, memory_format=torch.contiguous_format).reshape(-1)
    return (ones.cumsum(0) * _GOLDEN).remainder(1.0).to(torch.float32).reshape(like.shape)


def _uniform(tensor: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
    return tensor.copy_(_sequence(tensor) * (high - low) + low)


def _normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    return tensor.copy_(torch.erfinv(_sequence(tensor) * 1.998 - 0.999) * (2**0.5 * std) + mean)


def _bernoulli(tensor: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    return tensor.copy_(_sequence(tensor) < p)


def _dropout(tensor: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    kept = _sequence(tensor) >= p
    return tensor * kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "bernoulli_.float": _bernoulli,
    "bernoulli_.Tensor": _bernoulli,
    "native_dropout": _dropout,
}


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """Within it draws are fixed, in the whole process. Does not nest."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")  # which is what is wanted
        for op, kernel in _KERNELS.items():
            for key in ("CPU", "CUDA"):
                library.impl(op, kernel, key)
        yield


@contextlib.contextmanager
def applied(names: Iterable[str]) -> Iterator[None]:
    """``conditions.applied``, for conditions among which this one may be."""
    wanted = set(names)
    with fixed() if FIXED in wanted else contextlib.nullcontext(), conditions.applied(wanted - {FIXED}):
        yield


def twist(names: Iterable[str]) -> EagerTwist:
    """``conditions.twist``, for conditions among which this one may be."""
    return conditions.twist(set(names) - {FIXED})
