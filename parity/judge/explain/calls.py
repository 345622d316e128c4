"""Which of the model's own methods ran, in which order, with what: the call tree of one forward, seen by Python's profiler.

Hooks would see submodules only, and only those called by their ``__call__``; a forward is often cut at a method (``forward_enc``).
Nothing is installed on the module, so that the model cannot notice. Not seen: scripted and compiled modules.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from parity.runtime import tree
from parity.runtime.engine import on_device

_TORCH = os.path.dirname(torch.__file__) + os.sep
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Reason:
    """One thing that a graph cannot record. ``what``: the operation. ``where``: the model's own line. ``module``: path of the
    submodule whose code it is, ``""`` for the model itself. ``count``: how often one forward does it."""

    cause: str
    what: str
    where: str
    module: str
    count: int = 1


@dataclass
class Call:
    """One call of a method of a module.

    ``piece``: as a Seam names it; ``module``: the path of its owner; ``number``: of its calls so far; ``defined``: file and line of the
    method. ``operations``: device operations in it, its callees' included; ``seconds`` likewise. ``unfit``: why its arguments or its
    result could not cross the border of a graph; empty where they can. ``shapes``: of the tensors among its arguments. ``own``: reasons
    met in its own code; ``lines``: those it ran operations at.
    """

    piece: str
    module: str
    parent: Call | None = None
    number: int = 0
    defined: tuple[str, int] = ("", 0)
    calls: list[Call] = field(default_factory=list)
    operations: int = 0
    seconds: float = 0.0
    unfit: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    own: list[Reason] = field(default_factory=list)
    lines: set[str] = field(default_factory=set)

    @property
    def chain(self) -> tuple[tuple[str, int], ...]:
        """Piece and number of every call that is under way in it, the outermost first."""
        return (*(self.parent.chain if self.parent is not None else ()), (self.piece, self.number))

    def walk(self) -> Iterator[Call]:
        yield self
        for call in self.calls:
            yield from call.walk()

    def reasons(self) -> list[Reason]:
        return [reason for call in self.walk() for reason in call.own]


def unfit(value: Any, what: str) -> str:
    """Why a value cannot cross the border of a captured region."""
    leaves, _ = tree.flatten(value)
    if hidden := tree.opaque(leaves):
        return f"{what} holds a {hidden[0].__qualname__}"
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors:
        return f"{what} holds no tensor"
    if any(t.layout is not torch.strided or not on_device(t) for t in tensors):
        return f"{what} holds a tensor that is not on the device"
    return ""


class Calls:
    """``with Calls(module, leave) as calls: ...``, then ``calls.root`` is the tree. ``leave(call, result)`` is told of every call that
    returned, the innermost first."""

    def __init__(self, module: nn.Module, leave: Callable[[Call, Any], None] | None = None) -> None:
        self.root = Call("", "")
        self.top = self.root
        self._names = {id(m): name for name, m in reversed(list(module.named_modules()))}
        self._leave = leave
        self._codes: dict[CodeType, bool] = {}
        self._frames: list[tuple[FrameType, float]] = []
        self._numbers: Counter[str] = Counter()
        self._outer: Any = None

    def __enter__(self) -> Calls:
        self._outer = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._outer)

    def operation(self, line: str) -> None:
        """A device operation ran just now, at a line of the model."""
        author = self.top
        while author.defined[0].startswith(_TORCH) and author.parent is not None:  # torch's own layers have no line of the model's
            author = author.parent
        author.lines.add(line)
        call: Call | None = self.top
        while call is not None:
            call.operations += 1
            call = call.parent

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            known = self._codes.get(frame.f_code)
            if known is None:
                known = self._codes[frame.f_code] = _is_method(frame.f_code)
            if known:
                self._enter(frame)
        elif event == "return" and self._frames and self._frames[-1][0] is frame:
            _, began = self._frames.pop()
            call, self.top = self.top, self.top.parent or self.root
            call.seconds = time.perf_counter() - began
            call.unfit = call.unfit or unfit(argument, "its result")
            if self._leave is not None:
                self._leave(call, argument)

    def _enter(self, frame: FrameType) -> None:
        code, values = frame.f_code, frame.f_locals
        module = self._names.get(id(values["self"]))
        if module is None:
            return
        method = "" if code.co_name == "forward" else code.co_name
        given = code.co_argcount + code.co_kwonlyargcount
        extra = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        arguments = [values[name] for name in code.co_varnames[1 : given + extra]]
        piece = ".".join(part for part in (module, method) if part)
        self._numbers[piece] += 1
        call = Call(piece, module, self.top, self._numbers[piece], (code.co_filename, code.co_firstlineno))
        call.unfit = unfit(arguments, "an argument of it")
        call.shapes = tuple(tuple(x.shape) for x in tree.flatten(arguments)[0] if isinstance(x, Tensor))
        self.top.calls.append(call)
        self.top = call
        self._frames.append((frame, time.perf_counter()))


def _is_method(code: CodeType) -> bool:
    """A method of a module of the model's own, or a forward of torch's."""
    if not code.co_argcount or code.co_varnames[0] != "self" or code.co_flags & _GENERATOR or code.co_name.startswith("__"):
        return False
    return code.co_name == "forward" or not code.co_filename.startswith((_TORCH, "<"))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` for the length of a block."""
    absent = object()
    before = vars(owner).get(name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
