"""What the parts of the device share: the capture under way, the current stream, and where the call in progress puts its results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from parity.runtime.errors import CaptureRefused
from parity.runtime.legality import Violation, call_violation
from parity.runtime.source import user_line

from .memory import is_marked

if TYPE_CHECKING:
    from weakref import ReferenceType

    from .generators import Generator
    from .graph import CUDAGraph
    from .streams import Stream, StreamContext
    from .tape import Tape

CUDA: Final = torch.device("cuda", 0)
CPU: Final = torch.device("cpu")


class State:
    """One per process: an emulated device is used from one thread."""

    graph: CUDAGraph | None = None  # the graph being captured
    force: str | None = None  # the device type that the call in progress asks for
    generator: Generator | None = None  # the device generator passed to the call in progress
    context: bool = False  # the call in progress has a device operand: what its C++ body allocates is on the device
    default: Stream
    stream: Stream

    def __init__(self) -> None:
        self.scopes: list[StreamContext] = []
        self.unsealed: dict[int, ReferenceType[Tape]] = {}  # captured, and nobody has looked at what the capture computed

    def refuse(self, violation: Violation | None) -> None:
        """Raises CaptureRefused if there is a violation; a capture that collects is told instead, and the call goes on."""
        if violation is None or self.graph is None:
            return
        error = CaptureRefused(violation.cause, str(violation), user_line())
        if self.graph.collect is not None:
            self.graph.collect(error)
            return
        if violation.invalidates:
            self.graph.invalidated = error
        else:  # without the frames, which hold tensors
            self.graph.refused.append(CaptureRefused(error.cause, error.message, error.where))
        raise error

    def refuse_call(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        """The same for a Python-level function. Does nothing outside a capture."""
        if self.graph is not None:
            self.refuse(call_violation(func, args, kwargs or {}, is_marked))


STATE: Final = State()


@contextmanager
def quiet() -> Iterator[None]:
    """No modes, no autograd, no autocast: the bare kernels."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with (
        torch._C._DisableTorchDispatch(),  # type: ignore[no-untyped-call, unused-ignore]
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
        torch._C._ExcludeDispatchKeyGuard(autocast),
        torch.no_grad(),
    ):
        yield
