"""What a CUDA graph cannot record: one table from operation to rule, for every engine.

``violation`` speaks of operations as the dispatcher shows them, ``call_violation`` of Python functions whose work the dispatcher does
not show, or shows under another name. Both are pure: the emulated engine asks them while it captures; with a real device they are asked
in passive modes during an eager run, to say why, and on which line, a capture would be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from parity.runtime.violation import Call, Rule, data_dependent, sync
from parity.runtime.violation import Violation as Violation
from parity.runtime.violation import tensors_in as tensors_in
from parity.runtime.within import READS_WITHIN

aten = torch.ops.aten

WRONG_STREAM: Final[Mapping[str, str]] = {
    "torchvision::deform_conv2d": "deformable_im2col_kernel",
    "torchvision::_deform_conv2d_backward": "deformable_col2im_kernel and others",
}
"""Operations known to launch kernels (named here) on the legacy default stream: they run during a capture and are missing from the
graph. The first was seen in a profile on an H200; the second has the same launch without a stream in torchvision's source."""


def is_pinned(tensor: Tensor) -> bool:
    return tensor.is_pinned()


def device_type(device: Any) -> str:
    """``cuda``, ``cpu``, ... of anything that torch accepts as a device. A bare index is an accelerator's."""
    return "cuda" if isinstance(device, int) and not isinstance(device, bool) else torch.device(device).type


# ---------------------------------------------------------------- operations
def _copy(call: Call) -> Violation | None:
    target, source = call.args[0], call.args[1]
    to_device = call.on_device(target)
    if to_device == call.on_device(source):
        return None
    if not call.pinned(source if to_device else target):
        return Violation("h2d-copy" if to_device else "d2h-copy", call.name)
    if not call.argument(2, "non_blocking", False):
        return Violation("host-sync", f"{call.name}, blocking, with pinned memory")
    return None


def _to_copy(call: Call) -> Violation | None:
    source, device = call.args[0], call.kwargs.get("device")
    to_device = call.on_device(source) if device is None else device_type(device) == "cuda"
    if to_device == call.on_device(source):
        return None
    non_blocking = call.kwargs.get("non_blocking", False)
    if not to_device:  # torch allocates pinned memory for a non-blocking copy to the host
        return None if non_blocking else Violation("d2h-copy", "Tensor.to the host")
    if not call.pinned(source):
        return Violation("h2d-copy", "Tensor.to the device")
    return None if non_blocking else Violation("host-sync", "Tensor.to the device, blocking, from pinned memory")


def _indices(call: Call) -> list[Tensor]:
    return [i for i in call.args[1] if isinstance(i, Tensor)]


def _masked(indices: list[Tensor]) -> bool:
    return any(i.dtype in {torch.bool, torch.uint8} for i in indices)


def _host_indices(call: Call, indices: list[Tensor]) -> Violation | None:
    if all(call.on_device(i) for i in indices):
        return None
    return Violation("h2d-copy", f"{call.name} with indices on the host")


def _index(call: Call) -> Violation | None:
    if not call.on_device(call.args[0]):
        return None
    indices = _indices(call)
    if _masked(indices):
        return Violation("data-dependent-shape", f"{call.name} with a boolean mask")
    return _host_indices(call, indices)


def _index_put(call: Call) -> Violation | None:
    if not call.on_device(call.args[0]):
        return None
    indices, value = _indices(call), call.argument(2, "values")
    if _masked(indices):  # one mask and one number is masked_fill; anything else goes through nonzero
        number = value.numel() == 1 and not call.on_device(value)
        if not (number and len(indices) == 1 and not call.argument(3, "accumulate", False)):
            return Violation("data-dependent-shape", f"{call.name} with a boolean mask")
    return _host_indices(call, indices)


def _equal(call: Call) -> Violation | None:
    """CUDA answers without looking at values when the sizes differ, are empty, or both are the same view of one storage."""
    a, b = call.args[0], call.args[1]
    if not (call.on_device(a) and call.on_device(b)) or a.shape != b.shape or a.numel() == 0:
        return None
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.storage_offset() == b.storage_offset()
    if same and a.dtype == b.dtype and a.stride() == b.stride() and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg():
        return None
    return Violation("host-sync", call.name)


def _repeat_interleave(call: Call) -> Violation | None:
    return None if call.argument(1, "output_size") is not None else data_dependent(call)


def _literal(call: Call) -> Violation | None:
    return Violation("h2d-copy", "a tensor made of Python values") if call.on_device(call.args[0]) else None


def _where(call: Call) -> Violation | None:
    """A number of Python's is filled in on the device; a host tensor without dimensions is moved there."""
    operands = list(tensors_in((*call.args, *call.kwargs.values())))
    there = [call.on_device(t) for t in operands]
    return Violation("h2d-copy", f"{call.name} with a number on the host") if any(there) and not all(there) else None


OPERATIONS: Final[Mapping[str, Rule]] = {
    "aten::copy_": _copy,
    "aten::copy": _copy,
    "aten::_to_copy": _to_copy,
    "aten::index": _index,
    "aten::_unsafe_index": _index,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::equal": _equal,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::lift_fresh": _literal,
    "aten::_local_scalar_dense": sync,
    "aten::item": sync,
    "aten::_linalg_check_errors": sync,
    "aten::where": _where,
    **READS_WITHIN,
    "aten::linalg_matrix_exp": data_dependent,
    "torchvision::nms": data_dependent,
}
_RULES: dict[OpOverload[..., Any], Rule | None] = {}


def _rule(func: OpOverload[..., Any]) -> Rule | None:
    """The table first; then what torch itself says of an operation."""
    rule = OPERATIONS.get(func._schema.name)
    if rule is None and torch.Tag.dynamic_output_shape in func.tags:
        rule = data_dependent
    if rule is None and torch.Tag.data_dependent_output in func.tags:
        rule = sync
    _RULES[func] = rule
    return rule


def violation(
    func: OpOverload[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_device: Callable[[Tensor], bool],
    pinned: Callable[[Tensor], bool] = is_pinned,
) -> Violation | None:
    """Why an operation, as the dispatcher shows it, cannot be captured; None if it can."""
    rule = _RULES[func] if func in _RULES else _rule(func)
    return None if rule is None else rule(Call(func._schema.name, args, kwargs, on_device, pinned))


# ---------------------------------------------------------------- Python functions
def _first_on_device(cause: str) -> Rule:
    def rule(call: Call) -> Violation | None:
        return Violation(cause, call.name) if isinstance(call.args[0], Tensor) and call.on_device(call.args[0]) else None

    return rule


def _from_python(call: Call) -> Violation | None:
    """Python values become a host tensor first. A tensor does not: what happens to it, the dispatcher shows."""
    method = bool(call.args) and call.name == "Tensor.new_tensor"
    data = call.argument(1 if method else 0, "data", call.kwargs.get("obj"))
    device = call.kwargs.get("device")
    to_device = method and call.on_device(call.args[0]) if device is None else device_type(device) == "cuda"
    return Violation("h2d-copy", f"{call.name} of Python values") if to_device and not isinstance(data, Tensor) else None


def _always(call: Call) -> Violation | None:
    return Violation("host-sync", call.name)


CALLS: Final[Mapping[Any, tuple[str, Rule]]] = {
    Tensor.tolist: ("Tensor.tolist", _first_on_device("host-sync")),
    Tensor.__repr__: ("printing a tensor", _first_on_device("host-sync")),
    Tensor.numpy: ("Tensor.numpy", _first_on_device("d2h-copy")),
    Tensor.__array__: ("numpy.asarray of a tensor", _first_on_device("d2h-copy")),
    torch.tensor: ("torch.tensor", _from_python),
    torch.as_tensor: ("torch.as_tensor", _from_python),
    torch.asarray: ("torch.asarray", _from_python),
    Tensor.new_tensor: ("Tensor.new_tensor", _from_python),
    torch.cuda.synchronize: ("torch.cuda.synchronize", _always),
    torch.cuda.Stream.synchronize: ("Stream.synchronize", _always),
    torch.cuda.Stream.query: ("Stream.query", _always),
    torch.cuda.Event.synchronize: ("Event.synchronize", _always),
    torch.cuda.Event.query: ("Event.query", _always),
    torch.cuda.Event.elapsed_time: ("Event.elapsed_time", _always),
}


def call_violation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], on_device: Callable[[Tensor], bool]) -> Violation | None:
    """Why a Python-level function cannot be called during a capture; None if it can, or if the dispatcher shows what it does."""
    entry = CALLS.get(func)
    return None if entry is None else entry[1](Call(entry[0], args, kwargs, on_device, is_pinned))
