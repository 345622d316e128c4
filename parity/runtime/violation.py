"""What a rule of legality is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Violation:
    """``cause``: slug. ``what``: the operation, in words that fit behind a colon."""

    cause: str
    what: str

    @property
    def invalidates(self) -> bool:
        """Whether CUDA itself notices. torch refuses copies and seeds before CUDA hears of them: a swallowed error does no harm."""
        return self.cause not in {"h2d-copy", "d2h-copy", "rng"}

    def __str__(self) -> str:
        if not self.cause.endswith("-copy"):
            return f"not permitted while a stream is capturing: {self.what}"
        return f"no copy between host and device while capturing, unless the host tensor is pinned and non_blocking=True: {self.what}"


@dataclass(frozen=True)
class Call:
    """One call under judgement."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    on_device: Callable[[Tensor], bool]
    pinned: Callable[[Tensor], bool]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


Rule = Callable[[Call], Violation | None]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def touches_device(call: Call) -> bool:
    return any(call.on_device(t) for t in tensors_in((*call.args, *call.kwargs.values())))


def sync(call: Call) -> Violation | None:
    return Violation("host-sync", call.name) if touches_device(call) else None


def data_dependent(call: Call) -> Violation | None:
    return Violation("data-dependent-shape", call.name) if touches_device(call) else None
