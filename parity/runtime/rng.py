"""Every random stream a forward may draw from: saved before warm-up, put back after it and after a capture, failed ones included."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from parity.runtime.errors import CaptureRefused


@dataclass(frozen=True)
class Streams:
    """States of the default generators (host and one device), of Python's ``random``, of NumPy's legacy generator, and of ``others``:
    (generator, state, twin) of device generators that somebody owns, and of ``hosts``: (generator, state) of others."""

    host: torch.Tensor
    device: torch.Tensor
    twin: Any
    python: Any
    numpy: Any
    others: tuple[tuple[Any, torch.Tensor, Any], ...] = ()
    hosts: tuple[tuple[Any, torch.Tensor], ...] = ()


def _generator() -> Any:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def save(others: Sequence[Any] = (), hosts: Sequence[Any] = ()) -> Streams:
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
        tuple((g, g.get_state()) for g in hosts),
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
    for generator, state in (*((g, s) for g, s, _ in streams.others), *streams.hosts):
        generator.set_state(state)


_RESETS: Final = ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all")


@contextlib.contextmanager
def resets() -> Iterator[list[tuple[str, bool]]]:
    """Calls of the functions of ``torch.cuda`` by which this thread puts the current device's generator somewhere, and whether that
    moved it. A graph would not: torch.utils.checkpoint, say, draws anew in a replay where eager draws once more what it drew.

    A region that asks for gradients of its own has them, on a CUDA device, from a thread of autograd's, so that every backward counts;
    one that another thread runs meanwhile may be taken for the region's."""
    found: list[tuple[str, bool]] = []
    mine, generator = threading.get_ident(), _generator()

    def told(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = generator.get_state()
            function(*args, **kwargs)
            if threading.get_ident() == mine or torch._C._current_graph_task_id() >= 0:
                found.append((f"torch.cuda.{name}", not torch.equal(generator.get_state(), before)))

        return call

    originals = {name: getattr(torch.cuda, name) for name in _RESETS}
    try:
        for name, function in originals.items():
            setattr(torch.cuda, name, told(name, function))
        yield found
    finally:
        for name, function in originals.items():
            setattr(torch.cuda, name, function)


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
