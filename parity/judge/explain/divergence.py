"""Where a replay first differs from eager: which method's result, then which operation's.

Every result of a call of the model's own, in the order in which calls return, is reduced to a hash on the device; in a capture the
hashing is recorded with the forward, so that each replay tells all its intermediate results without copying any. The first hash that
differs names the innermost call that went wrong first; a second capture hashes every operation within that call. This looks, it does
not judge: hashing changes when memory is reused, and so may hide a fault. The verdict never comes from here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.judge.explain.calls import Call, Calls
from parity.judge.explain.tour import launches
from parity.judge.records import around, scale
from parity.judge.subject import Bench, seed_everything
from parity.rows.family import Subject
from parity.runtime import rng, tree
from parity.runtime.engine import on_device
from parity.runtime.source import describe, user_line
from parity.runtime.state import kept

WEIGHTS = "weights"
SCRIPT = (("A", ""), ("B", ""), ("A", ""), ("A", ""), ("A", "size"), ("B", ""), ("A", WEIGHTS))
"""Probe and variant of each call. Another size runs eagerly on the same module, as a caller's next image does; before the last call the
weights are scaled in place."""
AFTER_SIZE = 4
"""Compared calls before the one at another size."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = -0x61C8864680B583EB  # 2**64 / golden ratio, odd, as a signed number: consecutive multiples are spread over all 64 bits
_SPREAD = -0x4B47D0C5F2A1E8B3


@dataclass(frozen=True)
class Divergence:
    """``call``: number of the compared call, from 1, and its probe, or ``weights`` after they were scaled. ``piece``: the method whose
    result differed first, of the submodule ``module``. ``operation`` and ``where``: the first operation in it, or in the callers around
    it, whose result differed, or that eager ran and the replay does not hold; without one, what it returned was kept from an earlier
    call, and ``where`` is the method's own line. ``noisy``: it is eager that does not repeat itself there."""

    call: int
    probe: str
    piece: str
    module: str
    operation: str = ""
    where: str = ""
    noisy: bool = False


def hashed(tensor: Tensor) -> Tensor:
    """A position-weighted hash of a dense tensor's bits: int64, shape (), on the tensor's device.

    The bits are read as integers x_i of the element's width and summed as x_i * w_i modulo 2**64, w_i being odd and spread over all
    64 bits by two multiplications. One element that differs always shows: its difference is not 0 modulo 2**64 (no element is wider),
    and an odd factor keeps that. Elements that changed places show, since weights differ, unlike in a sum or an xor of hashes.
    Differences in several elements cancel only if their weighted sum is 0 modulo 2**64: for differences that do not know the weights
    about one in 2**64, and one in 2**(64 - k) if all are multiples of 2**k, at worst k = 31 for a float32 that only changed its sign.
    """
    plain = tensor.detach()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    flat = plain.resolve_neg().contiguous().reshape(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    bits = flat.view(_INTEGER[flat.element_size()]).to(torch.int64)
    place = torch.arange(1, flat.numel() + 1, device=tensor.device)
    weight = place * _STEP
    weight = (torch.bitwise_xor(weight, weight >> 32) * _SPREAD) | 1
    return (bits * weight).sum()


Chain = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Noted:
    """What was hashed: the result of a call, by its ``chain``, or of an operation, by name and line; and the module whose code it
    is."""

    name: str
    module: str
    chain: Chain = ()
    defined: tuple[str, int] = ("", 0)


class _Hashes:
    """The hashes of one forward: one per call that returned; or, given a ``chosen`` one, one per operation in its own code, and in that
    of the calls around it, until it returns."""

    def __init__(self, subject: Subject, chosen: Chain | None) -> None:
        self.subject, self.chosen = subject, chosen
        self.noted: list[_Noted] = []
        self.values: list[Tensor] = []
        self.calls = Calls(subject.module)
        self._over = False

    def run(self, region: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.noted, self.values, self._over = [], [], False
        self.calls = Calls(self.subject.module, self._leave)
        with self.calls if self.chosen is None else _both(_Operations(self), self.calls):
            result = region(*args)
        if self.chosen is None:
            self._note(_Noted("", "", ()), tree.flatten(result)[0])
        return result

    def operation(self, func: Any, result: Any) -> None:
        top = self.calls.top
        around = top is self.calls.root or (self.chosen is not None and (top.piece, top.number) in self.chosen)
        if around and not self._over and launches(func):
            self._note(_Noted(f"{func._schema.name}\n{user_line()}", top.module), tree_leaves(result))

    def _leave(self, call: Call, result: Any) -> None:
        if self.chosen is None:
            self._note(_Noted(call.piece, call.module, call.chain, call.defined), tree.flatten(result)[0])
        elif call.chain == self.chosen:
            self._over = True

    def _note(self, noted: _Noted, leaves: list[Any]) -> None:
        dense = [x for x in leaves if isinstance(x, Tensor) and x.layout is torch.strided and on_device(x)]
        self.noted.append(noted)
        self.values.append(torch.stack([hashed(x) for x in dense]) if dense else torch.zeros(0, dtype=torch.int64))

    def told(self) -> list[list[int]]:
        return [value.tolist() for value in self.values]


@contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


class _Operations(TorchDispatchMode):
    """Shows every operation and what it returned."""

    def __init__(self, hashes: _Hashes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hashes = hashes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hashes.operation(func, out)
        return out


@dataclass(frozen=True)
class _Difference:
    call: int
    probe: str
    noted: _Noted


def first_divergence(bench: Bench) -> Divergence | None:
    """None where every call of the script agrees in every result of every call of the model's own.

    Raises what a capture raises where the forward cannot be captured.
    """
    eager = _run(bench, None, graphed=False)
    found = _compare(eager, _run(bench, None, graphed=True))
    if found is None:
        return None
    noise = _compare(eager[: found.call], _run(bench, None, found.call, graphed=False))
    if noise is not None:
        return Divergence(noise.call, noise.probe, noise.noted.name, noise.noted.module, where=_defined(noise.noted), noisy=True)
    chain, limit = found.noted.chain, found.call
    within = _compare(_run(bench, chain, limit, graphed=False), _run(bench, chain, limit, graphed=True), lone=True)
    if within is None:
        return Divergence(found.call, found.probe, found.noted.name, found.noted.module, where=_defined(found.noted))
    operation, _, where = within.noted.name.partition("\n")
    return Divergence(found.call, found.probe, found.noted.name, within.noted.module, operation, where)


def _defined(noted: _Noted) -> str:
    return describe(*noted.defined) if noted.defined[0] else ""


_Told = list[tuple[str, list[_Noted], list[list[int]]]]


def _compare(first: _Told, second: _Told, *, lone: bool = False) -> _Difference | None:
    """The first difference. What is looked up once in eager's first calls and never again stands in one list alone, so results are
    paired by name and by how often that name was there before. ``lone``: where all pairs agree, the first without a partner counts."""
    alone: _Difference | None = None
    for number, ((probe, noted, mine), (_, others, theirs)) in enumerate(zip(first, second, strict=True)):
        partners = dict(zip(_keys(others), theirs, strict=True))
        for key, value in zip(_keys(noted), mine, strict=True):
            if key in partners and partners[key] != value:
                return _Difference(number + 1, probe, key[0])
            if lone and alone is None and key not in partners:
                alone = _Difference(number + 1, probe, key[0])
    return alone


def _keys(noted: list[_Noted]) -> list[tuple[_Noted, int]]:
    seen: Counter[_Noted] = Counter()
    keys = []
    for name in noted:
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def _run(bench: Bench, chosen: Chain | None, limit: int = len(SCRIPT), *, graphed: bool) -> _Told:
    subject = bench.build()
    hashes = _Hashes(subject, chosen)
    recorded: list[_Recorded] = []

    def stand_in(*args: Any) -> Any:
        if not graphed:
            return hashes.run(subject.region, args)
        if not recorded:
            recorded.append(_Recorded(hashes, args))
        return recorded[0].replay(args)

    seed_everything(bench.seed)
    told: _Told = []
    with around(bench):
        for probe, variant in SCRIPT:
            scaled = variant == WEIGHTS
            if len(told) == limit or not (scaled or bench.variant(variant) is not None):
                continue
            if scaled:
                scale(subject.module)
            other = bool(variant) and not scaled
            subject.compose(subject.region if other else stand_in)(*bench.args(probe, "" if scaled else variant))
            if not other:
                told.append((variant or probe, list(hashes.noted), hashes.told()))
                if bench.family.between is not None:
                    bench.family.between(subject.module)
    return told


class _Recorded:
    """torch's own capture of a forward with its hashes, warm-up undone."""

    def __init__(self, hashes: _Hashes, args: tuple[Any, ...]) -> None:
        static, region, module = tree.cloned(args), hashes.subject.region, hashes.subject.module
        self._inputs = tree.flatten(static)[0]
        streams, stream = rng.save(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with kept(module), torch.cuda.stream(stream):
            for _ in range(2):
                hashes.run(region, tree.cloned(args))
        torch.cuda.current_stream().wait_stream(stream)
        rng.restore(streams)
        self._graph: Any = torch.cuda.CUDAGraph()
        with kept(module), torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._output = hashes.run(region, static)
        rng.restore(streams)

    def replay(self, args: tuple[Any, ...]) -> Any:
        for static, given in zip(self._inputs, tree.flatten(args)[0], strict=True):
            if isinstance(static, Tensor):
                static.copy_(given)
        self._graph.replay()
        return tree.cloned(self._output)
