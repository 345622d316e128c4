"""What records and replays. Both engines are driven through ``torch.cuda``; this is the little that differs beyond it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

DEVICE: Final = torch.device("cuda", 0)
EMULATED_MARK: Final = "_parity_block"
"""Attribute of a storage object that makes its tensors lie on the emulated device."""


class Engine(Protocol):
    """``certifies``: whether a safe verdict on this engine is a certificate (``cuda``) or a screening (``emulated``)."""

    name: str
    certifies: bool

    def entered(self) -> AbstractContextManager[Any]:
        """Within it ``torch.cuda`` records and replays."""

    def quiet(self) -> AbstractContextManager[Any]:
        """Within it tensors are plain: what the judge does to them is not seen, not recorded, not refused."""

    def allocated_by(self, graphs: Iterable[Any], tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of the ``tensors`` whose storage was allocated while one of the ``graphs`` was captured."""

    def fate(self, address: int, nbytes: int) -> str:
        """What became of a storage whose owner is gone: ``unmapped``, ``free``, ``reused``; ``poisoned`` where replay reads poison
        for it without our doing."""

    def overwrite(self, address: int, content: Tensor) -> Tensor:
        """Writes ``content`` (uint8, on the device) over memory that is mapped; returns what stood there."""

    def stale(self, graphs: Iterable[Any]) -> list[str]:
        """What the last replays read after it had died, where the engine itself can tell."""

    def peak_memory(self) -> int:
        """Bytes allocated at most since the last call of this."""


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor lies on a device, true also inside a dispatch mode, where the emulated engine's function mode is off."""
    if tensor.is_cuda:
        return True
    try:
        return getattr(tensor.untyped_storage(), EMULATED_MARK, None) is not None
    except (RuntimeError, NotImplementedError):  # sparse and functional tensors have no storage, and are never emulated
        return False


def engine(name: str) -> Engine:
    """The engine called ``cuda`` or ``emulated``. Raises ValueError for other names."""
    if name == "cuda":
        from parity.runtime.cuda import CudaEngine

        return CudaEngine()
    if name == "emulated":
        from parity.runtime.emulated.engine import EmulatedEngine

        return EmulatedEngine()
    raise ValueError(f"no engine is called {name!r}: cuda, emulated")
