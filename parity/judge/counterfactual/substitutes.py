"""Deterministic stand-ins for the backwards (and one forward) that torch computes with atomic additions on CUDA.

Which ops those are is said by the documentation of ``torch.use_deterministic_algorithms``: the ones that raise there are replaced here.
The ones that switch to a deterministic algorithm of their own (``scatter_add``, ``index_add``, ``embedding``, ``cumsum``, replication
padding...) need no stand-in: the condition ``deterministic-algorithms`` is theirs.

A stand-in takes the place of the op's kernel in torch's dispatcher, below autograd and below autocast. So the forward keeps its bits
and its dtypes, and every caller is reached: by any name, from C++, from a checkpoint that is recomputed inside a backward, from the
autograd engine's own threads. A function mode would miss the third (it is switched off inside ``Tensor.backward``) and everything
that a composite such as ``interpolate(mode="area")`` calls; patched attributes would miss the second, and a function imported by name.

Nothing here synchronises with the host, and no shape depends on data: stand-ins can be captured. Sums over equal places go through
``index_put_(accumulate=True)``, which sorts on CUDA, and which is serial on a CPU with one thread. Half precision is computed in
float32 and rounded once. Products of matrices follow the TF32 setting.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from parity.judge.counterfactual import sampling

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Substitute:
    """``target``: the public function whose noise it takes away; ``kernels``: per ATen op what computes it instead."""

    name: str
    target: str
    kernels: Mapping[str, Kernel]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _as(result: Tensor, model: Tensor) -> Tensor:
    """With the dtype of ``model`` and its memory format."""
    last = model.dim() == 4 and not model.is_contiguous() and model.is_contiguous(memory_format=torch.channels_last)
    return result.to(model.dtype).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _spread(grad: Tensor, weights: list[Tensor]) -> Tensor:
    """``grad`` (..., *out) through the transpose of a separable linear op; ``weights``: per spatial axis (out, in)."""
    result = _wide(grad)
    for axis, weight in zip(range(-len(weights), 0), weights, strict=True):
        result = (result.movedim(axis, -1) @ weight).movedim(-1, axis)
    return _as(result, grad)


def _matrix(op: Kernel, grad: Tensor, size: int, out: int, dims: int, *options: Any) -> Tensor:
    """What a resize or a pool does along one axis, (out, size): its answer to unit vectors, which are put in as channels.

    They lie along the last axis: along the others torch's antialiased resize on a CPU is wrong where the last one has length 1. An
    idle axis is doubled where the length stays, because an op that keeps all lengths copies and forgets its scales.
    """
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    if size == 1:
        return grad.new_ones(out, 1, dtype=wide)
    idle = [2 if size == out else 1] * (dims - 1)
    units = grad.new_zeros(size, size, dtype=wide).fill_diagonal_(1).view(1, size, *[1] * (dims - 1), size)
    made: Tensor = op(units, [*idle, out], *options)
    return made.reshape(size, -1, out)[:, 0].T


def _resize(forward: str) -> Kernel:
    """Backward of a resize, from the matrices of ``forward`` itself."""

    def kernel(grad: Tensor, output_size: list[int], input_size: list[int], align_corners: bool, *scales: float | None) -> Tensor:
        if output_size == input_size[2:] and not forward.endswith("_aa"):
            return grad.clone()  # as the op does, whatever the scales
        op = getattr(torch.ops.aten, forward)
        dims = len(output_size)
        given = [*scales, *[None] * dims]  # trailing ones that are None do not arrive
        options = [(align_corners, *[None] * (dims - 1), scale) for scale in given]
        weights = [_matrix(op, grad, n, out, dims, *o) for n, out, o in zip(input_size[2:], output_size, options, strict=False)]
        return _spread(grad, weights)

    return kernel


def _average(forward: str, dims: int) -> Kernel:
    """Backward of an adaptive average pool: windows are boxes, so it is separable as a resize is."""

    def kernel(grad: Tensor, self: Tensor) -> Tensor:
        op = getattr(torch.ops.aten, forward)
        weights = [_matrix(op, grad, n, out, dims) for n, out in zip(self.shape[-dims:], grad.shape[-dims:], strict=True)]
        return _spread(grad, weights)

    return kernel


def _scatter(dims: int) -> Kernel:
    """Backward of a pool that kept the place of each maximum, flat within its plane."""

    def kernel(grad: Tensor, self: Tensor, *others: Any) -> Tensor:
        indices = others[-1]
        plane = self.shape[-dims:].numel()
        start = sampling.counted(grad, self.shape[:-dims].numel()).view(-1, 1) * plane
        places = (indices.reshape(start.shape[0], -1) + start).reshape(-1)
        values = _wide(grad).reshape(-1)
        flat = values.new_zeros(self.numel()).index_put_((places,), values, accumulate=True)
        return _as(flat.view(self.shape), grad)

    return kernel


def _unreflect(grad: Tensor, self: Tensor, padding: list[int]) -> Tensor:
    """Backward of reflection padding: each border is turned back and added, the left one first. Raises NotImplementedError where
    padding cuts."""
    if min(padding) < 0:
        raise NotImplementedError(f"no deterministic backward of reflection padding by {tuple(padding)}: a negative width")
    result = _wide(grad)
    for i in range(len(padding) // 2):
        left, right, axis = padding[2 * i], padding[2 * i + 1], -1 - i
        size = self.shape[axis]
        core = result.narrow(axis, left, size).clone()
        core.narrow(axis, 1, left).add_(result.narrow(axis, 0, left).flip(axis))
        core.narrow(axis, size - 1 - right, right).add_(result.narrow(axis, left + size, right).flip(axis))
        result = core
    return _as(result, grad)


def _nll(self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Forward of the loss per pixel: (N, C, H, W) log-probabilities and (N, H, W) classes to the loss and the sum of weights."""
    known = target != ignore_index
    classes = torch.where(known, target, 0)
    picked = _wide(self.gather(1, classes.unsqueeze(1)).squeeze(1))
    shares = torch.ones_like(picked) if weight is None else _wide(weight)[classes]
    shares = torch.where(known, shares, 0)
    losses = torch.where(known, -picked * shares, 0)
    if reduction == 0:
        return losses.to(self.dtype), self.new_zeros(())
    total = shares.sum()
    loss = losses.sum() / total if reduction == 1 else losses.sum()
    return loss.to(self.dtype), total.to(self.dtype)


def _named(suffix: str, made: Callable[[str], Kernel], *forwards: str) -> dict[str, Kernel]:
    return {forward + suffix: made(forward) for forward in forwards}


_RESIZES: Final = (
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
)  # fmt: skip


def _substitute(name: str, target: str, kernels: dict[str, Kernel]) -> Substitute:
    known = {op: kernel for op, kernel in kernels.items() if hasattr(torch.ops.aten, op)}
    return Substitute(name, "torch.nn.functional." + target, MappingProxyType(known))


SUBSTITUTES: Final = (
    _substitute(
        "grid_sample",
        "grid_sample",
        {
            "grid_sampler_2d_backward": sampling.backward,
            "grid_sampler_3d_backward": sampling.backward,
            "cudnn_grid_sampler_backward": sampling.cudnn_backward,
        },
    ),
    _substitute("interpolate", "interpolate", _named("_backward", _resize, *_RESIZES)),
    _substitute(
        "adaptive_avg_pool",
        "adaptive_avg_pool2d",
        {
            "_adaptive_avg_pool2d_backward": _average("_adaptive_avg_pool2d", 2),
            "_adaptive_avg_pool3d_backward": _average("_adaptive_avg_pool3d", 3),
        },
    ),
    _substitute(
        "max_pool",
        "adaptive_max_pool2d",
        {
            "adaptive_max_pool2d_backward": _scatter(2),
            "fractional_max_pool2d_backward": _scatter(2),
            "fractional_max_pool3d_backward": _scatter(3),
        },
    ),
    _substitute("reflection_pad", "pad", {f"reflection_pad{n}d_backward": _unreflect for n in (1, 2, 3)}),
    _substitute("nll_loss", "cross_entropy", {"nll_loss2d_forward": _nll}),
)
"""In the order in which they are worth trying: what detectors use first."""


def _below_autocast(kernel: Kernel) -> Kernel:
    """What a kernel calls is dispatched anew, and a backward within autocast would have its products cast."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return kernel(*args, **kwargs)

    return run


_BY_NAME: Final = {s.name: s for s in SUBSTITUTES}
_ACTIVE: Counter[str] = Counter()


@contextlib.contextmanager
def substituted(names: Iterable[str]) -> Iterator[None]:
    """Within it the named ops are computed by their substitutes, in the whole process. Nests. Raises ValueError for unknown names.

    A CUDA graph keeps what it was captured with; the emulated engine asks again at each replay, so replay inside as well.
    """
    wanted = list(dict.fromkeys(names))
    if unknown := [n for n in wanted if n not in _BY_NAME]:
        raise ValueError(f"no substitute is called {', '.join(unknown)}: {', '.join(_BY_NAME)}")
    fresh = [n for n in wanted if not _ACTIVE[n]]
    _ACTIVE.update(wanted)
    try:
        with contextlib.ExitStack() as stack:
            if fresh:
                library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")  # which is what is wanted
                    for name in fresh:
                        for op, kernel in _BY_NAME[name].kernels.items():
                            for key in ("CPU", "CUDA"):
                                library.impl(op, _below_autocast(kernel), key)
            yield
    finally:
        _ACTIVE.subtract(wanted)
