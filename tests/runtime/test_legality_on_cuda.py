"""The same table on a real device: asked in passive modes during an eager run, it names the cause of every idiom that is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parity.runtime.legality import CALLS, Violation, call_violation, violation

from .emulated.idioms import IDIOMS, MIXED, make_kit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
HIDDEN = {"sync"}  # torch.cuda.synchronize passes through neither mode


def _on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


class _Calls(TorchFunctionMode):
    def __init__(self, found: list[Violation]) -> None:
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (v := call_violation(func, args, kwargs or {}, _on_device)) is not None:
            self.found.append(v)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[Violation]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (v := violation(func, args, kwargs or {}, _on_device)) is not None:
            self.found.append(v)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n, i in IDIOMS.items() if i.cause != MIXED and n not in HIDDEN])
def test_an_eager_run_tells_why_a_capture_is_refused(name: str) -> None:
    found: list[Violation] = []
    with torch.no_grad():
        kit, x = make_kit(), torch.randn(4, 3, device="cuda")
        with _Operations(found), _Calls(found):
            try:
                IDIOMS[name].run(x, kit)
            except TypeError:  # a device tensor is no array, in eager either
                assert IDIOMS[name].cause == "d2h-copy"
    assert (found[0].cause if found else None) == IDIOMS[name].cause, found


def test_what_the_modes_do_not_see_is_in_the_table() -> None:
    assert torch.cuda.synchronize in CALLS
