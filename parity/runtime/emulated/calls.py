"""The function mode: where factories put their results, and what moves between host and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity.runtime.legality import device_type, violation

from .generators import Generator
from .memory import block_of, is_marked, is_pinned, mark, pin
from .state import CPU, STATE
from .tape import look

aten = torch.ops.aten


class forced:  # noqa: N801 - a context manager
    """For the length of a block, results go to this device."""

    __slots__ = ("before", "target")

    def __init__(self, target: str | None) -> None:
        self.target = target

    def __enter__(self) -> None:
        self.before, STATE.force = STATE.force, self.target

    def __exit__(self, *exc: object) -> None:
        STATE.force = self.before


class operands:  # noqa: N801
    """For the length of a block, what C++ bodies allocate is on the device if an operand is: they ask ``self.options()``."""

    __slots__ = ("before", "present")

    def __init__(self, *values: Any) -> None:
        self.present = has_device(values)

    def __enter__(self) -> None:
        self.before, STATE.context = STATE.context, self.present

    def __exit__(self, *exc: object) -> None:
        STATE.context = self.before


class passing:  # noqa: N801
    """For the length of a block, this is the generator that was passed."""

    __slots__ = ("generator",)

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def __enter__(self) -> None:
        STATE.generator = self.generator

    def __exit__(self, *exc: object) -> None:
        STATE.generator = None


def has_device(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if is_marked(value):
                return True
        elif isinstance(value, (list, tuple)) and has_device(value):
            return True
    return False


# ---------------------------------------------------------------- transfers
class _Move(torch.autograd.Function):
    """A transfer whose gradient travels back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: str, options: dict[str, Any]) -> Tensor:
        ctx.origin, ctx.dtype = "cuda" if is_marked(x) else "cpu", x.dtype
        with forced(target):
            return x.to(**options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return move(grads[0], ctx.origin, ctx.dtype), None, None


def move(
    x: Tensor, target: str | None, dtype: torch.dtype | None = None, non_blocking: bool = False, copy: bool = False, memory: Any = None
) -> Tensor:
    """``x.to(target)``: the tensor itself, as torch has it, where nothing is to be done."""
    options: dict[str, Any] = {"dtype": dtype or x.dtype, "copy": copy}
    if memory is not None:
        options["memory_format"] = memory
    if target in {None, "cuda" if is_marked(x) else "cpu"}:
        return x.to(**options)
    options["copy"] = True
    if target not in {"cuda", "cpu"}:
        return x.to(target, **options)
    assert target is not None
    if STATE.graph is not None:
        arguments = {"device": target, "non_blocking": non_blocking}
        STATE.refuse(violation(aten._to_copy.default, (x,), arguments, is_marked, is_pinned))
    if x.requires_grad and torch.is_grad_enabled():
        out = _Move.apply(x, target, options)
    else:
        with forced(target):
            out = x.to(**options)
    assert isinstance(out, Tensor)
    return pin(out) if target == "cpu" and non_blocking else out


def _to(func: Any, args: Any, kwargs: Any) -> Tensor:
    x = args[0]
    other = kwargs.get("other", args[1] if len(args) > 1 else None)
    if isinstance(other, Tensor):
        options = dict(zip(("non_blocking", "copy"), args[2:], strict=False))
        options.update((k, v) for k, v in kwargs.items() if k != "other")
        target = "cuda" if is_marked(other) else "cpu"
        non_blocking, copy = options.get("non_blocking", False), options.get("copy", False)
        return move(x, target, other.dtype, non_blocking, copy, options.get("memory_format"))
    plain = {k: v for k, v in kwargs.items() if k != "copy"}
    positional = list(args[1:])
    copy = kwargs.get("copy", False)
    if len(positional) > 2 and isinstance(positional[-1], bool):  # (device, dtype, non_blocking, copy), (dtype, non_blocking, copy)
        limit = 3 if not isinstance(positional[0], torch.dtype) else 2
        if len(positional) > limit:
            copy = positional.pop()
    device, dtype, non_blocking, memory = torch._C._nn._parse_to(*positional, **plain)
    return move(x, None if device is None else device.type, dtype, non_blocking, copy, memory)


def _type_as(func: Any, args: Any, kwargs: Any) -> Tensor:
    other = args[1] if len(args) > 1 else kwargs["other"]
    return move(args[0], "cuda" if is_marked(other) else "cpu", other.dtype)


def _cuda(func: Any, args: Any, kwargs: Any) -> Tensor:
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return move(args[0], "cuda", non_blocking=non_blocking, memory=kwargs.get("memory_format"))


def _cpu(func: Any, args: Any, kwargs: Any) -> Tensor:
    return move(args[0], "cpu", memory=kwargs.get("memory_format"))


def _type(func: Any, args: Any, kwargs: Any) -> Any:
    name = func(*args, **kwargs)
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) and is_marked(args[0]) else name


def _from_data(func: Any, args: Any, kwargs: Any) -> Any:
    """torch.tensor, as_tensor, asarray, Tensor.new_tensor: from Python's values, or from a tensor."""
    STATE.refuse_call(func, args, kwargs)
    kwargs = dict(kwargs)
    device, method = kwargs.pop("device", None), func is Tensor.new_tensor
    data = args[1] if method and len(args) > 1 else args[0] if args and not method else kwargs.get("data", kwargs.get("obj"))
    if device is not None:
        target: str | None = device_type(device)
    else:
        target = "cuda" if method and is_marked(args[0]) else None
    if isinstance(data, Tensor):
        copies = func in {torch.tensor, Tensor.new_tensor}
        target = target or ("cuda" if is_marked(data) else "cpu")
        out = move(data.detach() if copies else data, target, kwargs.get("dtype"), copy=copies or bool(kwargs.get("copy")))
        return out.requires_grad_() if kwargs.get("requires_grad") else out
    if target == "cuda":
        kwargs.pop("pin_memory", None)
        with forced("cpu"):
            out = func(*args, **kwargs).detach().clone()
        mark(out.untyped_storage())
        return out.requires_grad_(bool(kwargs.get("requires_grad", False)))
    if target not in {None, "cpu"}:
        kwargs["device"] = device
    pinned = kwargs.pop("pin_memory", False)
    with forced("cpu"):  # a list of device numbers is read by the host, one item() each
        out = func(*args, **kwargs)
    assert isinstance(out, Tensor)
    return pin(out) if pinned else out


def _numpy(func: Any, args: Any, kwargs: Any) -> Any:
    STATE.refuse_call(func, args, kwargs)
    if is_marked(args[0]):
        if kwargs.get("force", False):
            return func(move(args[0].detach(), "cpu"), **kwargs)
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")
    return func(*args, **kwargs)


def _tolist(func: Any, args: Any, kwargs: Any) -> Any:
    STATE.refuse_call(func, args, kwargs)
    look((block_of(args[0]),))
    return func(*args, **kwargs)


def _one_hot(func: Any, args: Any, kwargs: Any) -> Any:
    """With the number of classes given CUDA does not look at the values; the host's branch would."""
    x, classes = args[0], kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    with operands(x):
        if classes <= 0 or not is_marked(x):
            return func(*args, **kwargs)
        with forced("cuda"):
            return torch.zeros((*x.shape, classes), dtype=torch.long).scatter_(-1, x.unsqueeze(-1), 1)


_Special = Callable[[Any, Any, Any], Any]
SPECIAL: Final[dict[Any, _Special]] = {
    torch._C._nn._parse_to: lambda f, a, k: f(*a, **k),  # its device is an answer, not a place for results
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.cpu: _cpu,
    Tensor.type_as: _type_as,
    Tensor.type: _type,
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    torch._C._nn.one_hot: _one_hot,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    Tensor.new_tensor: _from_data,
}


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        pinned, device = kwargs.get("pin_memory", False), kwargs.get("device")
        if device is None and not pinned and "generator" not in kwargs:
            before = STATE.context
            STATE.context = has_device(args) or (bool(kwargs) and has_device(kwargs.values()))
            try:
                return func(*args, **kwargs)
            finally:
                STATE.context = before
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        generator = kwargs.get("generator")
        if isinstance(generator, Generator) and STATE.generator is None:
            with passing(generator):
                return self.__torch_function__(func, types, args, kwargs)
        target = None if device is None else device_type(device)
        if target == "cuda":
            kwargs["device"] = CPU
        with forced(target if target in {"cuda", "cpu"} else STATE.force), operands(args, tuple(kwargs.values())):
            out = func(*args, **kwargs)
        return pin(out) if pinned and isinstance(out, Tensor) else out
