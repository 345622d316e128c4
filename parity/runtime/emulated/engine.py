"""The emulated engine as the harness sees it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from parity.runtime.emulated import device
from parity.runtime.emulated.addresses import TAPES_OWN


class EmulatedEngine:
    """Screens; certifies nothing: kernels, streams inside C++ and numerics are the host's."""

    name = "emulated"
    certifies = False

    def entered(self) -> AbstractContextManager[Any]:
        return device()

    def quiet(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch._C.DisableTorchFunction())
        return stack

    def allocated_by(self, graphs: Iterable[Any], tensors: Iterable[Tensor]) -> list[Tensor]:
        recorded = list(graphs)
        others = (t for t in tensors if t.layout is torch.strided and not hasattr(t, TAPES_OWN))
        return [t for t in others if any(g.owns(t) for g in recorded)]

    def fate(self, address: int, nbytes: int) -> str:
        return "poisoned"

    def overwrite(self, address: int, content: Tensor) -> Tensor:
        raise NotImplementedError("the tape itself reads poison where an owner is gone")

    def stale(self, graphs: Iterable[Any]) -> list[str]:
        return [str(s) for g in graphs for s in g.stale]

    def peak_memory(self) -> int:
        peak = int(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return peak
