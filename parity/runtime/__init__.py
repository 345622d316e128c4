"""What a model zoo imports. Needs torch and the standard library, nothing else of this package.

Names are imported when they are first asked for: reading an allowlist needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.runtime.allowlist import Allowlist, AllowlistError
    from parity.runtime.errors import CaptureRefused, NotCertified, ParityError, StaleGraph
    from parity.runtime.identity import Identity
    from parity.runtime.model import CudaGraphModel
    from parity.runtime.runner import GraphRunner
    from parity.runtime.seams import Seam
    from parity.runtime.training import TrainGraphs

__all__ = [
    "Allowlist",
    "AllowlistError",
    "CaptureRefused",
    "CudaGraphModel",
    "GraphRunner",
    "Identity",
    "NotCertified",
    "ParityError",
    "Seam",
    "StaleGraph",
    "TrainGraphs",
]

_ROOMS = {
    "Allowlist": "allowlist",
    "AllowlistError": "allowlist",
    "CaptureRefused": "errors",
    "CudaGraphModel": "model",
    "GraphRunner": "runner",
    "Identity": "identity",
    "NotCertified": "errors",
    "ParityError": "errors",
    "Seam": "seams",
    "StaleGraph": "errors",
    "TrainGraphs": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
