"""The frozen key of a call: everything that a recorded graph holds fixed and a later call might not."""

from __future__ import annotations

import functools
import json
import numbers
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from parity.runtime.engine import on_device


@dataclass(frozen=True)
class Signature:
    """Hashable. ``leaves``: per tensor its geometry and which earlier leaf it shares storage with; per other leaf type and value.
    ``modes``: global switches that choose kernels. ``training``: the flag of every submodule."""

    spec: TreeSpec
    leaves: tuple[Hashable, ...]
    modes: tuple[Hashable, ...]
    training: tuple[bool, ...]

    def __hash__(self) -> int:
        return hash((self.leaves, self.modes, self.training))

    def __str__(self) -> str:
        shapes = [f"{list(x[1])} {str(x[2]).removeprefix('torch.')}" for x in self.leaves if isinstance(x, tuple) and x[0] == "tensor"]
        return ", ".join(shapes) or "no tensor"


def _switch(name: str) -> Callable[[], Hashable]:
    """What reads a global switch; None at every reading where this torch has no such switch."""
    found: Callable[[], Hashable] = getattr(torch._C, name, lambda: None)
    return found


def _precision() -> tuple[Callable[[], Hashable], ...]:
    """TF32 and its successors, for matrix products, convolutions and recurrent layers, each with what it inherits from a wider setting.
    Where torch has the newer setting, the older one must not be read: it raises once both were used."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:
        return _switch("_get_cublas_allow_tf32"), _switch("_get_cudnn_allow_tf32"), lambda: None
    return tuple(functools.partial(getter, "cuda", op) for op in ("matmul", "conv", "rnn"))


_matmul, _conv, _rnn = _precision()
_fp16_reduction = _switch("_get_cublas_allow_fp16_reduced_precision_reduction")
_bf16_reduction = _switch("_get_cublas_allow_bf16_reduced_precision_reduction")
_fp16_accumulation = _switch("_get_cublas_allow_fp16_accumulation")
_cudnn = _switch("_get_cudnn_enabled")
_benchmark = _switch("_get_cudnn_benchmark")
_cudnn_deterministic = _switch("_get_cudnn_deterministic")
_deterministic = _switch("_get_deterministic_algorithms")
_fills = _switch("_get_deterministic_fill_uninitialized_memory")
_flash = _switch("_get_flash_sdp_enabled")
_efficient = _switch("_get_mem_efficient_sdp_enabled")
_math = _switch("_get_math_sdp_enabled")
_cudnn_attention = _switch("_get_cudnn_sdp_enabled")
_math_reduction = _switch("_get_math_sdp_allow_fp16_bf16_reduction")


def modes() -> tuple[Hashable, ...]:
    """Global state that changes which kernels run: grad and inference mode, autocast, TF32, cuDNN, deterministic algorithms, SDPA."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled() and (torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()),  # without a name: CUDA's
        torch.get_default_dtype(),
        _fp16_reduction(),
        _bf16_reduction(),
        _deterministic(),
        *_rest(),
    )


def _rest() -> tuple[Hashable, ...]:
    """Of ``modes`` what a guard of torch's does not hold."""
    return (  # one by one: a loop over them would take half as long again, and a steady call reads them all
        torch.is_inference_mode_enabled(),
        _matmul(),
        _conv(),
        _rnn(),
        _fp16_accumulation(),
        _cudnn(),
        _benchmark(),
        _cudnn_deterministic(),
        _fills(),
        _flash(),
        _efficient(),
        _math(),
        _cudnn_attention(),
        _math_reduction(),
    )


_STRIDED = torch.strided
_PLAIN = frozenset({int, bool, str, type(None), bytes, torch.dtype, torch.device})


def quick(leaves: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Hashable, ...] | None:
    """What ``signature`` tells apart, for a call whose arguments are plain tensors and scalars, at a fraction of its cost.

    ``leaves``: the positional arguments, then the keyword arguments called ``names``. None where some leaf is anything else.
    """
    key: list[Hashable] = [names, modes()]
    for leaf in leaves:
        kind = type(leaf)
        if kind is Tensor:
            if leaf.layout is not _STRIDED:
                return None
            try:
                shift = leaf.data_ptr() & 15
            except RuntimeError:  # torch.func maps or differentiates it
                return None
            key.append(
                (
                    leaf.shape,
                    leaf.stride(),
                    leaf.dtype,
                    leaf.device,
                    leaf.requires_grad,
                    shift,
                    leaf.is_conj() or leaf.is_neg(),
                )
            )
        elif kind in _PLAIN:
            key.append((kind, leaf))
        else:
            return None
    if len(leaves) > 1:
        key.append(aliases([x for x in leaves if type(x) is Tensor]))
    return tuple(key)


_GUARDED = frozenset(
    ["grad_mode", "autocast_state", "deterministic_algorithms", "allow_tf32", "allow_fp16_reduce", "allow_bf16_reduce", "default_dtype"]
)


def _guard() -> Callable[[], bool] | None:
    """What tells whether global state is as it is now, by what torch guards compiled code with; None where that holds less than
    ``_rest`` leaves out."""
    kind: Any = getattr(torch._C._dynamo.guards, "GlobalStateGuard", None)
    if not hasattr(kind, "__getstate__"):
        return None
    guard = kind()
    check: Callable[[], bool] = guard.check
    return check if set(json.loads(guard.__getstate__())) >= _GUARDED else None


def alike(leaf: Tensor) -> Callable[[Any], bool] | None:
    """What tells whether the only argument of another call, whatever it is, has the ``quick`` key of this one; it may be wrong to deny
    that, never to claim it. What torch guards compiled code with, instead of a key and a look-up; None where this torch lacks that."""
    guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    state = _guard()
    if guards is None or state is None:
        return None
    geometry = {"dynamic_dims_sizes": [list(leaf.shape)], "dynamic_dims_strides": [list(leaf.stride())]}
    same = guards(leaf, **geometry).check  # type, dispatch keys (with layout, conjugate and negative bits), dtype, device, geometry
    shift, grads, switches = leaf.data_ptr() & 15, leaf.requires_grad, _rest()

    def fits(x: Any) -> bool:
        return same(x) and state() and x.data_ptr() & 15 == shift and x.requires_grad is grads and _rest() == switches

    return fits


def aliases(tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
    """Per tensor the first one that is the same object, and the first one on the same storage."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    return tuple((objects.setdefault(id(t), i), storages.setdefault(t.untyped_storage()._cdata, i)) for i, t in enumerate(tensors))


def _value(leaf: Any) -> Hashable:
    if isinstance(leaf, numbers.Number) and not isinstance(leaf, int):  # NumPy's too
        return repr(leaf)  # 0.0 == -0.0, and nan is unequal to itself
    if isinstance(leaf, slice):
        return tuple((type(x), x) for x in (leaf.start, leaf.stop, leaf.step))
    hash(leaf)
    return leaf  # type: ignore[no-any-return]


def signature(leaves: list[Any], spec: TreeSpec, training: tuple[bool, ...] = ()) -> Signature:
    """The key of a call whose arguments were flattened. Raises TypeError for an unhashable leaf that is no tensor."""
    same = iter(aliases([x for x in leaves if isinstance(x, Tensor)]))
    described: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append(
                (
                    "tensor",
                    tuple(leaf.shape),
                    leaf.dtype,
                    leaf.stride(),
                    str(leaf.device),
                    on_device(leaf),
                    leaf.requires_grad,
                    leaf.data_ptr() & 15,
                    next(same),
                )
            )
        else:
            described.append((type(leaf), _value(leaf)))
    return Signature(spec, tuple(described), modes(), training)
