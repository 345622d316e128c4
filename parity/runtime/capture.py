"""What inference and training share of a capture: which arguments go into a graph, and what is put back around one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from parity.runtime import rng, tree
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.liveness import Trace
from parity.runtime.refusal import explain


class Holder(Protocol):
    """Whoever holds graphs."""

    def release(self, reason: str = ...) -> None: ...


HOLDERS: Final[weakref.WeakSet[Holder]] = weakref.WeakSet()
"""All of this process: each puts itself here."""


class CaptureFailed(CaptureRefused):
    """A capture was begun and did not end well: graphs captured before it in this process follow a generator state it broke."""


def release_all() -> None:
    """After a failed capture, with no lock held: two threads may get here at once."""
    for holder in list(HOLDERS):
        holder.release("a capture failed in this process, and graphs follow the generator state it broke")


def unfit(leaves: list[Any]) -> str:
    """Why arguments cannot go into a graph, whatever it computes; empty where they can."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if foreign := tree.opaque(leaves):
        return f"an argument is a {foreign[0].__qualname__}, whose tensors cannot be seen"
    for t in tensors:
        if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or t.is_conj() or t.is_neg():
            return f"an input is a {type(t).__name__} of layout {t.layout}: only plain strided tensors are captured"
    if len({t.device for t in tensors if on_device(t)}) > 1:
        return "the inputs lie on several devices"
    return ""


@contextlib.contextmanager
def undone(before: Any, stream: Any, streams: rng.Streams, traced: Trace) -> Iterator[None]:
    """Around captures on ``stream``: afterwards ``before`` waits for them and is current, and random streams are as they were. Raises
    CaptureFailed where a capture fails."""
    try:
        yield
    except BaseException as error:
        torch.cuda.set_stream(before)  # torch does not leave the capture stream when the end of a capture raises
        rng.repair(streams)
        if not isinstance(error, Exception):
            raise
        reason = explain(error, traced)
        raise CaptureFailed(reason.cause, reason.message, reason.where) from error
    before.wait_stream(stream)
    rng.restore(streams)
