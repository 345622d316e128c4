"""Where a forward is cut: which submodules or methods are captured. All between them stays the model's own Python, run eagerly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from parity.runtime.invalidation import LOCAL, opened, scope
from parity.runtime.pool import Pool
from parity.runtime.runner import GraphRunner

_ABSENT: Final = object()


@dataclass(frozen=True)
class Seam:
    """``pieces``: dotted paths from the model to what is captured, each a submodule (its ``forward``) or a method; ``""`` is the model.

    ``max_graphs``: shapes per piece, further ones run eager. ``eager``: what stays outside and why, for those who read it.
    """

    pieces: tuple[str, ...] = ("",)
    max_graphs: int = 8
    eager: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.pieces, tuple) or not self.pieces:
            raise ValueError(f"pieces={self.pieces!r}: give a tuple of paths, such as ('encoder', 'head.decode')")
        if len(set(self.pieces)) != len(self.pieces):
            raise ValueError(f"pieces={self.pieces}: a path stands there twice")
        if self.max_graphs < 1:
            raise ValueError(f"max_graphs={self.max_graphs}: at least one graph per piece")

    def bind(self, root: Any, gap: Callable[[list[Tensor]], str] | None = None, **options: Any) -> BoundSeam:
        """``options``: of GraphRunner. Raises AttributeError where a path leads nowhere."""
        return BoundSeam(self, root, gap, options)


def _place(root: Any, path: str) -> tuple[Any, str]:
    """Whose attribute a piece is, and its name. Raises AttributeError where the path leads nowhere."""
    owner: Any = root
    *steps, last = [p for p in path.split(".") if p] or [""]
    for step in steps:
        owner = getattr(owner, step)
    target = getattr(owner, last) if last else root
    if isinstance(target, nn.Module):
        return target, "forward"
    if not last:
        raise TypeError(f"piece '' is a {type(root).__name__}, not a module: name one of its methods")
    return owner, last


class _Shared:
    """What the pieces of one seam have in common: where they are active, and one pool per device, so that their graphs follow each
    other and never overlap. Knows no piece: a model that is let go of is free at once."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.pools: dict[int, Pool] = {}

    def pool(self) -> Pool:
        index = torch.cuda.current_device()
        if index not in self.pools:
            self.pools[index] = Pool()
        return self.pools[index]

    def active(self) -> bool:
        return bool(getattr(self.here, "active", False)) and not LOCAL.busy


def _itself(region: Any) -> Any:
    return region


class _Piece:
    """One captured piece. Installed as an attribute of its owner for the time of a scope; other threads pass through it unchanged, and
    in a copy of its owner made meanwhile stands what is captured."""

    def __init__(self, seam: BoundSeam, root: Any, path: str) -> None:
        owner, last = _place(root, path)
        self.path, self.owner, self.name, self._shared = path, owner, last, seam.shared
        module = owner if isinstance(owner, nn.Module) else next((m for m in vars(owner).values() if isinstance(m, nn.Module)), None)
        self.runner = GraphRunner(
            getattr(owner, last),
            module,
            max_graphs=seam.seam.max_graphs,
            pool=seam.shared.pool,
            gap=seam.gap,
            name=path or type(root).__name__,
            **seam.options,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner(*args, **kwargs) if self._shared.active() else self.runner.region(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.runner.region,)

    def stands(self, root: Any) -> bool:
        """Whether the path still leads to what is captured; asked while it is not installed. True where it leads nowhere any more, or
        to None, and where that cannot be told: what a descriptor such as partialmethod makes anew for each look equals nothing."""
        try:
            owner, name = _place(root, self.path)
        except AttributeError:
            return True
        found = getattr(owner, name)
        if not callable(found):
            return True
        here = owner is self.owner and name == self.name
        return here and (bool(found == self.runner.region) or bool(found != getattr(owner, name)))


class BoundSeam:
    """A seam on one model. ``scope`` makes it work; outside of one the model is as it was."""

    def __init__(self, seam: Seam, root: Any, gap: Callable[[list[Tensor]], str] | None, options: dict[str, Any]) -> None:
        self.seam = seam
        self.gap = gap
        self.options = options
        self.shared = _Shared()
        self._root = root
        self._lock = threading.RLock()
        self._users = 0
        self._before: list[Any] = []
        self.pieces = [_Piece(self, root, path) for path in seam.pieces]

    @property
    def runners(self) -> dict[str, GraphRunner]:
        return {piece.path: piece.runner for piece in self.pieces}

    def active(self) -> bool:
        """In this thread."""
        return self.shared.active()

    @contextmanager
    def scope(self, after: int = 1) -> Iterator[BoundSeam]:
        """Within it, in this thread, the pieces are captured at the call number ``after`` of a shape, and replayed from then on.
        ``after=0``: eager, also inside an outer scope."""
        with scope(max(after, 1)):
            self._install()
            close = opened(self.shared.here, "active", after > 0, False)
            try:
                yield self
            finally:
                close()
                self._remove()

    def release(self, reason: str = "released") -> None:
        for piece in self.pieces:
            piece.runner.release(reason)
        self.shared.pools.clear()

    def _install(self) -> None:
        with self._lock:
            if self._users == 0:
                for i, piece in enumerate(self.pieces):
                    if not piece.stands(self._root):  # another submodule, or another method, stands there
                        piece.runner.release("it was replaced")
                        self.pieces[i] = _Piece(self, self._root, piece.path)
                self._before = [vars(p.owner).get(p.name, _ABSENT) for p in self.pieces]
                for piece in self.pieces:
                    vars(piece.owner)[piece.name] = piece
            self._users += 1  # last: an error leaves nothing that would look installed

    def _remove(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for piece, before in zip(self.pieces, self._before, strict=True):
                    if before is _ABSENT:
                        vars(piece.owner).pop(piece.name, None)
                    else:
                        vars(piece.owner)[piece.name] = before
