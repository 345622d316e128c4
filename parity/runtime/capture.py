"""What inference and training share of a capture: which arguments go into a graph, and what is put back around one."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks

from parity.runtime import rng, tree
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.liveness import Trace, held_tensors, storage_of
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


@contextlib.contextmanager
def releasing() -> Iterator[None]:
    """Around a capture: one that fails, or is interrupted, drops all graphs of the process."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, CaptureFailed) or not isinstance(error, Exception):
            release_all()
        raise


def unfit(leaves: list[Any]) -> str:
    """Why arguments cannot go into a graph, whatever it computes; empty where they can."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if foreign := tree.opaque(leaves):
        return f"an argument is a {foreign[0].__qualname__}, whose tensors cannot be seen"
    for t in tensors:
        if torch._C._functorch.is_functorch_wrapped_tensor(t):
            return "an input is mapped or differentiated by torch.func"
        if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or t.is_conj() or t.is_neg():
            return f"an input is a {type(t).__name__} of layout {t.layout}: only plain strided tensors are captured"
    if len({t.device for t in tensors if on_device(t)}) > 1:
        return "the inputs lie on several devices"
    return ""


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Casts in autocast's cache outlive the call, and would look like state of the module."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def hooked(module: nn.Module | None) -> bool:
    """Whether hooks may run in a forward of a module, those for all modules included."""
    own = module is not None and any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    return own or bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


def hooked_backward(module: nn.Module) -> bool:
    own = any(m._backward_hooks or m._backward_pre_hooks for m in module.modules())
    return own or bool(hooks._global_backward_hooks or hooks._global_backward_pre_hooks)


def weakly(leaves: Iterable[Any]) -> list[StorageWeakRef]:
    return [StorageWeakRef(s) for x in leaves if isinstance(x, Tensor) and (s := storage_of(x)) is not None]


def outliving(refs: list[StorageWeakRef], module: nn.Module | None) -> list[StorageWeakRef]:
    """What of a call that is over somebody keeps, attributes of ``module`` aside."""
    gc.collect()
    held = {ref.cdata for ref in weakly(t for _, t in held_tensors(module))} if module is not None else set()
    return [ref for ref in refs if not ref.expired() and ref.cdata not in held]


def kept_by_hooks(module: nn.Module | None, traced: Trace, left: Iterable[StorageWeakRef], other: Iterable[StorageWeakRef]) -> None:
    """Raises CaptureRefused where each call leaves a tensor of its own with somebody outside of a module that has hooks, such as those
    that collect features: a replay runs no Python, and would leave them with what the capture gave them.

    ``left``: what outlived a call of what it was given and gave back; ``other``: what another call gave back. What is in both is
    handed out by each call, and kept for that."""
    if not hooked(module):
        return
    if (kept := next((read for read in traced.reads if read.suspected and not read.path), None)) is not None:
        raise CaptureRefused("host-state", f"a hook keeps {kept}, where a replay would leave the capture's")
    if {ref.cdata for ref in left} - {ref.cdata for ref in other}:
        raise CaptureRefused("host-state", "a hook keeps an input or an output, where a replay would leave the capture's")


@contextlib.contextmanager
def undone(before: Any, stream: Any, streams: rng.Streams, traced: Trace) -> Iterator[None]:
    """Around captures on ``stream``: afterwards ``before`` waits for them and is current, and random streams are as they were. Raises
    CaptureFailed where a capture fails; after that, and after an interrupt, earlier graphs have to be released."""
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
