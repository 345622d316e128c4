"""Operations that read values on the device in a body of their own, where no mode looks: one of C++, or one of Python's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from parity.runtime.violation import Call, Rule, Violation, sync, touches_device


def _device_value(position: int, name: str) -> Rule:
    """What is read before a kernel starts: a number that lies on the device, spreads of which none may be negative."""

    def rule(call: Call) -> Violation | None:
        value = call.argument(position, name)
        if not (isinstance(value, Tensor) and call.on_device(value)):
            return None
        return Violation("host-sync", f"{call.name} reads its {name}")

    return rule


def _histogram(call: Call) -> Violation | None:
    """Without limits they are those of the values."""
    if call.argument(2, "min", 0) != call.argument(3, "max", 0) or call.args[0].numel() == 0:
        return None
    return Violation("host-sync", f"{call.name} without limits") if touches_device(call) else None


def _isin(call: Call) -> Violation | None:
    """A few values are compared with each element; more are sorted, without those that are there twice."""
    elements, tests = call.args[0], call.argument(1, "test_elements")
    if not (isinstance(elements, Tensor) and isinstance(tests, Tensor)) or call.argument(2, "assume_unique", False):
        return None
    few = tests.numel() < 10.0 * elements.numel() ** 0.145
    return None if few or not touches_device(call) else Violation("data-dependent-shape", f"{call.name} with many values")


def _segment_reduce(call: Call) -> Violation | None:
    return None if call.argument(6, "unsafe", False) else sync(call)


def _fake_quantize(call: Call) -> Violation | None:
    zero_point = call.argument(2, "zero_point")
    return None if zero_point.is_floating_point() else _device_value(2, "zero_point")(call)


_ALWAYS: Final = (
    "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig", "aten::linalg_lstsq", "aten::linalg_pinv",
    "aten::cholesky_inverse", "aten::embedding_renorm_",
    "aten::linspace", "aten::logspace", "aten::_nested_tensor_from_mask_left_aligned", "aten::_nested_tensor_from_mask",
)  # fmt: skip
"""Solvers that ask whether they converged (BatchLinearAlgebra.cpp), a renormalisation that counts its distinct indices
(cuda/Embedding.cu), ranges between tensors (RangeFactories.cpp), nested tensors, whose sizes are on the host
(nested/NestedTensorMath.cpp). The rules for single values, above, are of TensorCompare.cpp, Indexing.cu, DistributionTemplates.h,
SummaryOps.cu, Distributions.cpp, SegmentReduce.cpp and quantized/FakeQuantPerChannelAffine.cpp."""

READS_WITHIN: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_ALWAYS, sync),
    **dict.fromkeys(("aten::masked_fill", "aten::masked_fill_"), _device_value(2, "value")),
    **dict.fromkeys(("aten::index_fill", "aten::index_fill_"), _device_value(3, "value")),
    "aten::normal": _device_value(1, "std"),
    "aten::histc": _histogram,
    "aten::isin": _isin,
    "aten::segment_reduce": _segment_reduce,
    "aten::fake_quantize_per_channel_affine_cachemask": _fake_quantize,
}


def body_of(func: OpOverload[..., Any]) -> Callable[..., Any] | None:
    """The function that ``torch.library.custom_op`` made an operation of."""
    bodies: dict[str | None, Callable[..., Any]] = getattr(OPDEFS.get(func._schema.name), "_backend_fns", {})
    return bodies.get("cuda") or bodies.get(None)
