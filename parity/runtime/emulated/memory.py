"""What makes a tensor a device tensor: a block noted on its storage object, which torch keeps for as long as the storage lives.

Views, ``.data``, ``detach``, parameters, saved tensors and gradients therefore inherit it, and types stay ``torch.Tensor`` and
``nn.Parameter``. Data lies in ordinary host memory.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, UntypedStorage

from parity.runtime.engine import EMULATED_MARK

BLOCK: Final = EMULATED_MARK
PINNED: Final = "_parity_pinned"


class Ledger:
    """Bytes of device storages alive now, and at most since the last reset."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0


LEDGER: Final = Ledger()


class Block:
    """The allocation behind one device storage. ``graph``: number of the tape whose capture allocated it, or 0."""

    __slots__ = ("graph", "nbytes")

    def __init__(self, nbytes: int, graph: int = 0) -> None:
        self.nbytes = nbytes
        self.graph = graph
        LEDGER.allocated += nbytes
        if LEDGER.allocated > LEDGER.peak:
            LEDGER.peak = LEDGER.allocated

    def __del__(self, ledger: Ledger = LEDGER) -> None:  # bound early: at interpreter exit globals may be gone
        ledger.allocated -= self.nbytes


def block_of(tensor: Tensor) -> Block | None:
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError, ValueError):  # of sparse, functional and uninitialised ones, which stay on the host
        return None
    return getattr(storage, BLOCK, None)


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor is on the emulated device: the truth also inside a TorchDispatchMode, and after the device was left."""
    return block_of(tensor) is not None


def mark(storage: UntypedStorage, graph: int = 0) -> None:
    setattr(storage, BLOCK, Block(storage.nbytes(), graph))


def is_pinned(tensor: Tensor) -> bool:
    return bool(getattr(tensor.untyped_storage(), PINNED, False))


def pin(tensor: Tensor) -> Tensor:
    setattr(tensor.untyped_storage(), PINNED, True)
    return tensor
