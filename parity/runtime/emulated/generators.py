"""The device's random numbers: a seed and an offset, as on CUDA, so that a replay advances the very state that eager would."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from parity.runtime.legality import Violation

from .state import CPU, CUDA, STATE

_HostGenerator = torch.Generator
_MASK: Final = 2**64 - 1
_STEP: Final = 4  # CUDA's offsets are multiples of four


def _mixed(value: int) -> int:
    """splitmix64: neighbouring offsets give unrelated seeds."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Counter:
    """What generators share after ``graphsafe_set_state`` and what a graph registers. One operation draws at one offset."""

    __slots__ = ("offset", "seed")

    def __init__(self, seed: int = 0, offset: int = 0) -> None:
        self.seed = seed
        self.offset = offset

    @property
    def next(self) -> int:
        """The seed of the next operation that draws."""
        return _mixed(self.seed ^ _mixed(self.offset))

    def advance(self) -> None:
        self.offset += _STEP


class Generator(_HostGenerator):
    """``torch.Generator("cuda")``. A host generator by type, so that torch's parser takes it as an argument."""

    counter: Counter

    def __new__(cls, device: Any = CUDA) -> Generator:
        self: Generator = _HostGenerator.__new__(cls, CPU)  # type: ignore[call-arg]
        self.counter = Counter()
        return self

    def __init__(self, device: Any = CUDA) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def manual_seed(self, seed: int) -> Generator:
        """In a capture only the seed that is there already, and then nothing happens (torch's CUDAGeneratorImpl.cpp). One that collects
        is told in any case: a replay would not seed."""
        seed = int(seed) & _MASK
        if STATE.graph is None:
            self.counter.seed, self.counter.offset = seed, 0
        elif self.counter.seed != seed or STATE.graph.collect is not None:
            STATE.refuse(Violation("rng", "another seed for a generator of the device"))
        return self

    def seed(self) -> int:
        STATE.refuse(Violation("rng", "Generator.seed"))
        seed = random.SystemRandom().getrandbits(64)
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        return self.counter.seed

    def get_offset(self) -> int:
        STATE.refuse(Violation("rng", "Generator.get_offset"))
        return self.counter.offset

    def set_offset(self, offset: int) -> Generator:
        if offset % _STEP:
            raise RuntimeError(f"offset must be a multiple of {_STEP}, not {offset}")
        STATE.refuse(Violation("rng", "Generator.set_offset"))
        self.counter.offset = offset
        return self

    def get_state(self) -> Tensor:
        """Sixteen bytes on the host: seed, offset."""
        data = self.counter.seed.to_bytes(8, "little") + self.counter.offset.to_bytes(8, "little")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def set_state(self, new_state: Tensor) -> Generator:
        data = bytes(new_state.tolist())
        if len(data) != 16:
            raise RuntimeError(f"RNG state is wrong size: {len(data)} bytes instead of 16; it is not one of this device's generator")
        seed, offset = (int.from_bytes(data[i : i + 8], "little") for i in (0, 8))
        if seed != self.counter.seed:
            STATE.refuse(Violation("rng", "a state with another seed for a generator of the device"))
        self.counter.seed, self.counter.offset = seed, offset
        return self

    def clone_state(self) -> Generator:
        clone = Generator()
        clone.counter = Counter(self.counter.seed, self.counter.offset)
        return clone

    def graphsafe_get_state(self) -> Generator:
        shared = Generator()
        shared.counter = self.counter
        return shared

    def graphsafe_set_state(self, state: Generator) -> Generator:  # type: ignore[override]
        self.counter = state.counter
        return self

    def __reduce__(self) -> Any:
        return _rebuilt, (self.counter.seed, self.counter.offset)


def _rebuilt(seed: int, offset: int) -> Generator:
    generator = Generator()
    generator.counter = Counter(seed, offset)
    return generator


class _EntryMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _HostGenerator)


class GeneratorEntry(metaclass=_EntryMeta):
    """What ``torch.Generator`` is while the device is entered: both kinds of generator are instances of it."""

    def __new__(cls, device: Any = CPU) -> Any:
        return Generator() if torch.device(device).type == "cuda" else _HostGenerator(device)


DEFAULT: Final = Generator()


@contextmanager
def drawing(counter: Counter, generator: _HostGenerator | None) -> Iterator[None]:
    """One operation draws on the device. Where no generator is passed, torch's kernels take the host's default one: lend it."""
    lent = torch.default_generator if generator is None else generator
    host = lent.get_state()
    _HostGenerator.manual_seed(lent, counter.next)
    before = lent.get_state()
    try:
        yield
        if not torch.equal(lent.get_state(), before):  # attention without dropout is tagged as random and draws nothing
            counter.advance()
    finally:
        if generator is None:
            lent.set_state(host)


def counter_for(generator: _HostGenerator | None) -> Counter:
    """The state that an operation on the device draws from. Raises for a host generator, and for one that the capture does not know.

    ``generator``: what the dispatcher shows, a nameless twin of what the caller passed.
    """
    if generator is not None and STATE.generator is None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    counter = (DEFAULT if generator is None or STATE.generator is None else STATE.generator).counter
    if STATE.graph is not None and not STATE.graph.knows(counter):
        raise RuntimeError("a capture does not know the generator used in it: call register_generator_state on the graph before")
    return counter
