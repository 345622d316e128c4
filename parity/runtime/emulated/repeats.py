"""Heavy kernels and replays whose operands hold bits that they were given before: the result is copied, not computed again.

A protocol runs one forward some forty times on a handful of inputs, and most of that time goes into products of matrices that were
formed already. A kernel is a function of the bits it reads, of how they lie in memory, and of torch's settings; all three are compared,
the bits byte by byte and not by a digest. An operand that differs in one bit is therefore computed with, wherever it came from, and a
replay that reads a wrong address gets a wrong result as before. Only without gradients: what training does to a kernel is not for this
module to judge. Everything is forgotten when the device is left.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from .arena import ALIGNED, Arena
from .state import quiet

_memcmp: Final = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
_PIECES, _PIECE = 8, 32

Cost = Callable[..., int]


def _product(a: Tensor, b: Tensor) -> int:
    return a.numel() * (b.shape[-1] if b.dim() else 0)  # of a call that is wrong the kernel says so


def _convolution(x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *_: Any) -> int:
    pixels = x.shape[0] * math.prod(x.shape[2:])
    return pixels * weight.numel() // (1 if transposed else math.prod(int(s) for s in stride))


def _attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, *_: Any) -> int:
    return 2 * query.numel() * (key.shape[-2] if key.dim() > 1 else 0)


COSTS: Final[dict[str, Cost]] = {
    "aten::convolution": _convolution,
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::addmm": lambda bias, a, b: _product(a, b),
    "aten::baddbmm": lambda bias, a, b: _product(a, b),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
}
"""About how many multiplications and additions an operation makes, from its positional arguments; each returns new tensors only."""


OPEN: Final = frozenset({"aten", "prims", "torchvision"})
"""Libraries whose operations say in their schema what they read, write and draw. Others may keep something that nobody sees."""


def still(func: Any, args: Any) -> bool:
    """Whether a heavy operation draws no random numbers: attention does with dropout, its fourth argument."""
    return func._schema.name != "aten::_scaled_dot_product_flash_attention_for_cpu" or len(args) < 4 or args[3] == 0


def pays(work: int, nbytes: int) -> bool:
    """Whether comparing and copying so many bytes costs less than a third of the work: measured on one core of a server, 20
    multiplications and additions and 8 bytes of memory a nanosecond, and 30 microseconds a call."""
    return work > 60 * (30_000 + nbytes // 8)


def room() -> int:
    """Bytes that one process may hold: processes as many as processors take a sixth of the memory together."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (6 * (os.cpu_count() or 1))


class _Bits:
    """A copy of some memory."""

    __slots__ = ("address", "nbytes", "place", "slab")

    def __init__(self, address: int, nbytes: int, arena: Arena) -> None:
        self.slab, self.place, self.address = arena.piece(nbytes)
        self.nbytes = nbytes
        ctypes.memmove(self.address, address, nbytes)


class _Form(NamedTuple):
    """A tensor that was: its bits, and how it looked at them."""

    bits: _Bits
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self, own: bool) -> Tensor:
        """It again; not ``own``: for reading only."""
        count = self.bits.nbytes // self.dtype.itemsize
        flat = torch.frombuffer(self.bits.slab, dtype=self.dtype, count=count, offset=self.bits.place)
        old = flat.as_strided(self.shape, self.stride)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).copy_(old) if own else old


class Memory(Protocol):
    """Bytes at an address: a storage."""

    def data_ptr(self) -> int: ...
    def nbytes(self) -> int: ...


class Repeats:
    """``computed`` and ``repeated`` count calls of kernels, ``run`` and ``skipped`` replays. ``limit``: bytes held at most, a quarter
    of them by replays alone; what does not fit is computed every time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._arena = Arena()
        self.forget()

    def forget(self) -> None:
        self.held = self.computed = self.repeated = self.run = self.skipped = 0
        self._seen: dict[Any, list[_Bits]] = {}
        self._results: dict[Any, tuple[bool, list[_Form]]] = {}
        self._replays: dict[Any, list[_Bits]] = {}
        self._arena.clear()

    def result(self, func: Any, call: Any, args: Any, kwargs: Any, *, keep: bool) -> Any:
        """``call(*args, **kwargs)``, the kernel of ``func``. ``keep``: the caller keeps what it gets; otherwise it only reads it."""
        key = None
        operands = (*args, *kwargs.values())
        tensors = [x for x in operands if isinstance(x, Tensor)]
        plain = all(t.layout is torch.strided and not t.is_nested for t in tensors)
        if plain and pays(COSTS[func._schema.name](*args), sum(t.numel() * t.element_size() for t in tensors)):
            with quiet():
                key = self._key(func, operands, tuple(kwargs))
                if key is not None and (found := self._results.get(key)) is not None:
                    self.repeated += 1
                    single, forms = found
                    old = [form.tensor(keep) for form in forms]
                    return old[0] if single else tuple(old)
        out = call(*args, **kwargs)
        if key is not None:
            self.computed += 1
            results = (out,) if isinstance(out, Tensor) else out
            with quiet():
                bits = [self._bits_of(t) for t in results]
                if None not in bits:
                    forms = [_Form(b, t.dtype, t.shape, t.stride()) for t, b in zip(results, bits, strict=True) if b is not None]
                    self._results[key] = (isinstance(out, Tensor), forms)
        return out

    def replay(self, tape: int, reads: Sequence[Memory], writes: Sequence[Memory], run: Callable[[], bool]) -> None:
        """Runs a replay, or puts back what it wrote when all that it reads was the same. ``reads``: storages whose values from before
        it count; ``writes``: those that it writes. ``run`` returns whether it drew nothing."""
        before = [self._bits(m.data_ptr(), m.nbytes(), self.limit) for m in reads]
        key = None if None in before else (tape, _settings(), *(m.nbytes() for m in writes), *map(id, before))
        if key is not None and (after := self._replays.get(key)) is not None:
            self.skipped += 1
            for memory, bits in zip(writes, after, strict=True):
                ctypes.memmove(memory.data_ptr(), bits.address, bits.nbytes)
            return
        self.run += 1
        alone = run()
        if key is None or not alone or _changed(reads, before, {m.data_ptr() for m in writes}):
            return
        left = [self._bits(m.data_ptr(), m.nbytes(), self.limit) for m in writes]
        if None not in left:
            self._replays[key] = [bits for bits in left if bits is not None]

    def _key(self, func: Any, operands: Any, names: tuple[str, ...]) -> Any:
        """What decides a kernel's result; None where an operand is new and finds no room."""
        parts: list[Any] = [func, _settings(), names]
        for value in operands:
            if isinstance(value, Tensor):
                bits = self._bits_of(value)
                if bits is None:
                    return None
                form = (value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
                parts += [id(bits), form, value.data_ptr() % ALIGNED]
            else:
                parts.append(repr(value))
        return tuple(parts)

    def _bits_of(self, tensor: Tensor) -> _Bits | None:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if not tensor.numel() or span > 2 * tensor.numel():  # mostly gaps
            return None
        return self._bits(tensor.data_ptr(), span * tensor.element_size(), self.limit * 3 // 4)

    def _bits(self, address: int, nbytes: int, limit: int) -> _Bits | None:
        """The one copy of what lies there, made now if there is none."""
        like = self._seen.get(place := (nbytes, _sample(address, nbytes)), ())
        for bits in like:
            if not _memcmp(bits.address, address, nbytes):
                return bits
        if self.held + nbytes > limit:
            return None
        self.held += nbytes
        bits = _Bits(address, nbytes, self._arena)
        self._seen.setdefault(place, []).append(bits)
        return bits


def _changed(reads: Sequence[Memory], before: Sequence[_Bits | None], known: set[int]) -> bool:
    """Whether an operation wrote what its schema does not say."""
    others = [(m.data_ptr(), bits) for m, bits in zip(reads, before, strict=True) if bits is not None and m.data_ptr() not in known]
    return any(_memcmp(bits.address, address, bits.nbytes) for address, bits in others)


def _sample(address: int, nbytes: int) -> bytes:
    if nbytes <= _PIECES * _PIECE:
        return ctypes.string_at(address, nbytes)
    step = (nbytes - _PIECE) // (_PIECES - 1)
    return b"".join([ctypes.string_at(address + place * step, _PIECE) for place in range(_PIECES)])


def _settings() -> tuple[Any, ...]:
    """What of torch, and of the processor, decides which kernel computes, and how."""
    return (
        torch.get_num_threads(), torch.get_float32_matmul_precision(), torch._C._get_mkldnn_enabled(),
        torch.are_deterministic_algorithms_enabled(), _TINY * 1.0 == 0.0, *(p() for p in _PRECISIONS),
    )  # fmt: skip


_TINY = 2.0**-1060
"""A denormal number: zero where this thread flushes those, which is no setting that torch can be asked for."""
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_PRECISIONS: Final[tuple[Callable[[], Any], ...]] = tuple(
    functools.partial(_precision, "mkldnn", kind) for kind in ("all", "conv", "matmul") if _precision is not None
)

REPEATS: Final = Repeats(room())
