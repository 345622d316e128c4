"""A steady call in one function: a look at its only argument, addresses that are known, a launch.

What a call costs the host is mostly the code that it touches for the first time since the last one: each function of ours on the way
costs more than what it does. So where nothing is out of the ordinary, and copies are nodes of the graph, all of it is said once more
here, in one frame. Whatever is not as it was at the last call is left to the general way (``GraphRunner``, ``Entry.replay``), which
this one never makes unnecessary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from parity.runtime.cudart import Unfit
from parity.runtime.signature import alike

if TYPE_CHECKING:
    from parity.runtime.record import Entry

MISS: Final = object()
"""Said of a call that has to go the general way."""


def steady(entry: Entry, leaf: Tensor) -> Callable[[Any], Any] | None:
    """A call of ``entry`` with one argument, positional: its result, or MISS, with nothing done. None where there is no such shortcut.

    ``leaf``: the argument of a call that ``entry`` was just looked up for. The module, and whether a runner is busy, is not looked at.
    """
    copies, pool, derived, assemble = entry.copies, entry.pool, entry.derived, entry.outlet.assemble
    capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    if copies is None or not (copies.numbered and copies.gives) or copies.positions != [0] or assemble is None or capturing is None:
        return None
    fits = alike(leaf)
    if fits is None:
        return None
    empty, forms, known, runtime = copies.empty, copies.forms, copies.known, copies.runtime
    lock, current, device = pool.lock, pool.current, pool.device
    elsewhere = copies.elsewhere if copies.devices > 1 else None

    def call(x: Any) -> Any:
        if not fits(x) or capturing() or (derived is not None and entry.doubtful()) or (elsewhere is not None and elsewhere()):
            return MISS
        made = [empty(size, stride, dtype) for size, stride, dtype in forms]
        addresses = (x.data_ptr(), *[result.data_ptr() for result in made])
        with lock:
            stream = current(device)
            if pool.number is None or stream != pool.number:
                return MISS
            executable = known.get(addresses)
            if executable is None:
                try:
                    executable = copies.aim(addresses)
                except Unfit:
                    return MISS
            if code := runtime.launch(executable, stream):
                runtime.launched(code)
            entry.replays += 1
        return assemble(made)

    return call
