"""What the dispatch mode needs to know of an operation, read once from its schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from parity.runtime.legality import WRONG_STREAM

from .repeats import COSTS

_COPIES: Final = frozenset({"aten::copy_", "aten::copy"})
_INDEXED: Final = frozenset(
    {
        "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"
    }
)  # fmt: skip
_MIXED: Final = _COPIES | {
    "aten::_to_copy",
    "aten::set_",
    "aten::_pack_padded_sequence",
    "aten::_pad_packed_sequence",
    "aten::is_same_size",
}
_ON_THE_HOST: Final = {"aten::_pack_padded_sequence": frozenset({1})}
"""Results that stay on the host whatever the operands: how many rows a packed sequence has at each step."""
_ALLOCATIONS: Final = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_permuted"}
)
_SHAPE_ONLY: Final = _ALLOCATIONS | {
    "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::randn_like", "aten::randint_like",
    "aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::is_same_size",
}  # fmt: skip
# running statistics, which these schemas do not declare as written
_HIDDEN_WRITES: Final = {"aten::native_batch_norm": ((3, "running_mean"), (4, "running_var"))}


@dataclass(frozen=True)
class Plan:
    """What an operation does, tensors aside.

    ``composite``: made of other operations, with no kernel of its own. ``python``: where the device's kernel is a Python function.
    ``blind``: reads no data of its operands. ``recorded``: launches a kernel. ``heavy``: so much that its results are worth
    remembering. ``hosted``: results, by position, that are on the host. ``writes``: arguments written, by position and name.
    """

    name: str
    composite: bool
    python: torch._C.DispatchKey | None
    copies: bool
    indexed: bool
    mixed: bool
    blind: bool
    recorded: bool
    seeded: bool
    transfer: bool
    wrong_stream: bool
    heavy: bool
    hosted: frozenset[int]
    writes: tuple[tuple[int, str], ...]

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        found: list[Tensor] = []
        for position, name in self.writes:
            value = args[position] if position < len(args) else kwargs.get(name)
            found += [t for t in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(t, Tensor)]
        return found


_TORCHS: Final = frozenset({"aten", "prim", "prims", "streams"})


def _python(func: OpOverload[..., Any], full: str) -> torch._C.DispatchKey | None:
    """The key under which somebody registered a kernel of Python's for the device: by ``torch.library``, for CUDA or for any device."""
    if func.namespace in _TORCHS:
        return None
    for key in ("CUDA", "CompositeExplicitAutograd"):
        if f"{full.replace('::', '/')}/{key}" in torch.library._impls:
            found: torch._C.DispatchKey = getattr(torch._C.DispatchKey, key)
            return found
    return None


_PLANS: dict[OpOverload[..., Any], Plan] = {}


def plan_of(func: OpOverload[..., Any]) -> Plan:
    plan = _PLANS.get(func)
    if plan is None:
        plan = _PLANS[func] = _read(func)
    return plan


def _read(func: OpOverload[..., Any]) -> Plan:
    schema = func._schema
    name, overload = schema.name, schema.overload_name
    full = f"{name}.{overload}" if overload else name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    view = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    metadata = torch.Tag.inplace_view in func.tags
    writes = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    return Plan(
        name=name,
        # what tells a subclass of tensors its layout or, in some versions of torch, its dimensions is in no table of kernels
        composite=torch._C._dispatch_has_kernel(full) and has_kernel(full, "CompositeImplicitAutograd") and not has_kernel(full, "CPU"),
        python=_python(func, full),
        copies=name in _COPIES,
        indexed=name in _INDEXED,
        mixed=name in _MIXED,
        blind=name in _SHAPE_ONLY or view or metadata,
        recorded=not (name in _ALLOCATIONS or metadata),
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        transfer=name in _COPIES or name == "aten::_to_copy",
        wrong_stream=name in WRONG_STREAM,
        heavy=name in COSTS and not overload and not schema.is_mutable,
        hosted=_ON_THE_HOST.get(name, frozenset()),
        writes=() if metadata else writes or _HIDDEN_WRITES.get(name, ()),
    )
