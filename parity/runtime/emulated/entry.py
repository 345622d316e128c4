"""Entering the device: the two modes and the patches, and leaving everything as it was."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Final

import torch

from .calls import FunctionMode
from .dispatch import DispatchMode
from .repeats import REPEATS
from .state import STATE

_ABSENT: Final = object()


class device:  # noqa: N801 - used as torch.cuda.device is
    """``with device(): ...``: inside, "cuda" exists.

    Re-entrant in one thread; other threads must stay out (RuntimeError), because modes belong to a thread and patches to the process.
    On leaving, also by an error, every patched attribute is as it was and a capture still under way is dropped.
    """

    _depth = 0
    _thread = 0
    _saved: list[tuple[Any, str, Any]]
    _stance: Any
    _modes: tuple[DispatchMode, FunctionMode]

    def __enter__(self) -> device:
        if device._depth and device._thread != threading.get_ident():
            raise RuntimeError("another thread has entered the emulated device; it serves one thread at a time")
        from .patches import patches  # imports parts of torch that nobody needs outside

        device._depth += 1
        if device._depth == 1:
            device._thread = threading.get_ident()
            device._saved = []
            device._stance = torch.compiler.set_stance("force_eager")  # nothing compiles for a device that is not there
            try:
                device._stance.__enter__()
                for owner, name, value in list(patches()):
                    device._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
                    setattr(owner, name, value)
                device._modes = (DispatchMode(), FunctionMode())  # type: ignore[no-untyped-call]
                for mode in device._modes:
                    mode.__enter__()  # type: ignore[no-untyped-call]
            except BaseException:
                self._restore()
                device._depth = 0
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        device._depth -= 1
        if device._depth == 0:
            for mode in reversed(device._modes):
                mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
            if STATE.graph is not None:
                STATE.graph.abort()
            STATE.stream, STATE.force, STATE.context = STATE.default, None, False
            STATE.scopes.clear()
            REPEATS.forget()
            self._restore()

    @staticmethod
    def _restore() -> None:
        device._stance.__exit__(None, None, None)
        while device._saved:
            owner, name, value = device._saved.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
