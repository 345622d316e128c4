"""Every random stream a forward may draw from: saved before warm-up, put back after it and after a capture, failed ones included."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from parity.runtime.errors import CaptureRefused


@dataclass(frozen=True)
class Streams:
    """States of the default generators (host and one device), of Python's ``random``, of NumPy's legacy generator, and of ``others``:
    (generator, state, twin) of device generators that somebody owns."""

    host: torch.Tensor
    device: torch.Tensor
    twin: Any
    python: Any
    numpy: Any
    others: tuple[tuple[Any, torch.Tensor, Any], ...] = ()


def _generator() -> Any:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def save(others: Sequence[Any] = ()) -> Streams:
    """The streams as they are. Not during a capture: reading a device generator there is refused."""
    numpy = sys.modules.get("numpy")
    generator = _generator()
    return Streams(
        torch.get_rng_state(),
        generator.get_state(),
        generator.clone_state(),
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
        tuple((g, g.get_state(), g.clone_state()) for g in others),
    )


def drawn(streams: Streams) -> bool:
    """Whether a device generator has moved since."""
    moved = not torch.equal(_generator().get_state(), streams.device)
    return moved or not all(torch.equal(generator.get_state(), state) for generator, state, _ in streams.others)


def restore(streams: Streams) -> None:
    torch.set_rng_state(streams.host)
    _generator().set_state(streams.device)
    random.setstate(streams.python)
    if streams.numpy is not None:
        sys.modules["numpy"].random.set_state(streams.numpy)
    for generator, state, _ in streams.others:
        generator.set_state(state)


_RESETS: Final = ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all")
_WITHIN: Final = "parity: resets of random generators"
"""Where the list of ``resets`` lies in a thread's state. Autograd hands that on to the thread that runs a backward: a region that asks
for gradients of its own has them, on a CUDA device, from another thread than its own."""


def _listening() -> Any:
    return torch._C._get_obj_in_tls(_WITHIN) if torch._C._is_key_in_tls(_WITHIN) else None


@contextlib.contextmanager
def resets() -> Iterator[list[tuple[str, bool]]]:
    """Calls of the functions of ``torch.cuda`` by which this thread, and each backward that it starts, puts the current device's
    generator somewhere, and whether that moved it. A graph would not: torch.utils.checkpoint, say, draws anew in a replay where eager
    draws once more what it drew."""
    found: list[tuple[str, bool]] = []
    outer, generator = _listening(), _generator()

    def told(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = generator.get_state()
            function(*args, **kwargs)
            if _listening() is found:
                found.append((f"torch.cuda.{name}", not torch.equal(generator.get_state(), before)))

        return call

    originals = {name: getattr(torch.cuda, name) for name in _RESETS}
    torch._C._stash_obj_in_tls(_WITHIN, found)
    try:
        for name, function in originals.items():
            setattr(torch.cuda, name, told(name, function))
        yield found
    finally:
        for name, function in originals.items():
            setattr(torch.cuda, name, function)
        torch._C._stash_obj_in_tls(_WITHIN, outer)


def refuse(found: list[tuple[str, bool]], first: int = 0) -> None:
    """Raises CaptureRefused where a region was seen to put its generator elsewhere. ``first``: so many were in the first of its calls,
    which may build something, or compile: they count where later ones follow."""
    moved = [name for name, moves in found if moves]
    if moved and len(found) > first:
        raise CaptureRefused(
            "rng", f"{moved[0]} sets the random generator in each call, as torch.utils.checkpoint does; a replay draws on"
        )


def repair(streams: Streams) -> None:
    """``restore`` after a failed capture, which leaves the device generators refusing every later draw ("Offset increment outside
    graph capture"): the states they hold are exchanged for twins saved before. Graphs captured earlier follow the old states, so
    their owners must drop them."""
    _generator().graphsafe_set_state(streams.twin)
    for generator, _, twin in streams.others:
        generator.graphsafe_set_state(twin)
    restore(streams)
