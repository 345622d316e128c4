"""The ways to run a training step: stand-ins for the network that capture once they have warmed up."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from parity.judge.subject import BrokenRow, blamed
from parity.rows.training import TrainSubject
from parity.runtime import rng, tree
from parity.runtime.errors import CaptureRefused
from parity.runtime.liveness import Trace, trace
from parity.runtime.refusal import chain, explain
from parity.runtime.signature import Signature, signature
from parity.runtime.state import kept
from parity.runtime.training import TrainGraphs

_OFTEN = 2
"""Graphs dropped for one reason before that is what keeps a run eager: putting a subject's state back may drop some, too."""


class TrainArm(Protocol):
    """``cache``: whether autocast keeps its casts of weights around a step of this arm. ``replays``: of graphs, in a step that is
    replayed."""

    cache: bool
    replays: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The network's outputs. Raises CaptureRefused where the capture is refused."""

    def refusal(self) -> CaptureRefused | None:
        """Why it runs eagerly for good, or None."""

    def why(self) -> str:
        """What kept it eager so far, where it says so; else empty."""

    def invalidate(self) -> None:
        """The network computes something else from here on."""

    def release(self) -> None:
        """Drops the graphs."""


class EagerTraining:
    """The network itself. As an arm of its own it must end as ``not_graphed``."""

    cache = True
    replays = 1

    def __init__(self, subject: TrainSubject) -> None:
        self._network = subject.network

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._network(*args, **kwargs)

    def refusal(self) -> CaptureRefused | None:
        return None

    def why(self) -> str:
        return ""

    def invalidate(self) -> None:
        return None

    def release(self) -> None:
        return None


class _Telling(TrainGraphs):
    """Remembers the error behind the one line that it logs, and why graphs, or what was heard for one, were dropped."""

    error: BaseException | None = None

    def __init__(self, network: nn.Module, **more: Any) -> None:
        self.dropped: Counter[str] = Counter()
        super().__init__(network, **more)

    def release(self, reason: str = "released") -> None:
        self.dropped[reason] += 1
        super().release(reason)

    def _fail(self, reason: str, error: BaseException) -> None:
        self.error = error
        super()._fail(reason, error)


class GraphedTraining:
    """Our runtime, as a trainer uses it; one eager step of a signature is enough to hear how gradients arrive."""

    cache = True
    replays = 2

    def __init__(self, subject: TrainSubject) -> None:
        self.graphs = _Telling(subject.network, threshold=1, log=lambda line: None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.graphs(*args, **kwargs)

    def refusal(self) -> CaptureRefused | None:
        if not self.graphs.reason:
            return None
        if self.graphs.error is not None:
            _pass_on(self.graphs.error)
            found = explain(self.graphs.error, None)
            own = isinstance(self.graphs.error, CaptureRefused) and found.cause == "unknown"
            return cast("CaptureRefused", self.graphs.error) if own else found
        return CaptureRefused("host-state", self.graphs.reason)

    def why(self) -> str:
        for reason, count in self.graphs.dropped.most_common(1):
            if count > _OFTEN:
                return f"it starts over time and again: {reason}"
        return next((reason for reason, _ in self.graphs.eager.most_common(1)), "")

    def invalidate(self) -> None:
        self.graphs.invalidate("told to")

    def release(self) -> None:
        self.graphs.release()


class NativeTraining:
    """The zoo's own manager. The network's forward is traced before its first step, to name a cause where the manager gives up."""

    def __init__(self, subject: TrainSubject) -> None:
        if subject.native is None:
            raise BrokenRow("this family has no manager of its own: it declares an arm 'native', but its TrainSubject has none")
        self.replays = 1  # nobody says that it captures the backward apart
        with blamed(lambda: "native()"):
            self._native = subject.native()
        self.cache = bool(self._native.autocast_cache)
        self._subject = subject
        self._trace: Trace | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._trace is None:
            self._trace = _traced(self._subject.network, args, kwargs)  # now: after a failed capture nothing can be run any more
        try:
            return self._native(*args, **kwargs)
        except Exception as error:
            _pass_on(error)
            raise explain(error, self._trace) from error

    def refusal(self) -> CaptureRefused | None:
        reason = self._native.reason()
        return explain(RuntimeError(reason), self._trace) if reason else None

    def why(self) -> str:
        return ""

    def invalidate(self) -> None:
        return None

    def release(self) -> None:
        del self._native


class _OnlyTensors(nn.Module):
    """A network as a function of tensors alone, which is all that torch.cuda.make_graphed_callables takes: other arguments stay what
    they were, and outputs are the tensors among the leaves. Around the network, whose own ``forward`` torch would replace."""

    def __init__(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.network = network
        self.training = network.training
        self._leaves, self._spec = tree.flatten((args, kwargs))
        self._result: tuple[list[Any], Any] = [], None

    def tensors(self) -> list[Tensor]:
        return [x for x in self._leaves if isinstance(x, Tensor)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        args, kwargs = tree.unflatten([next(given) if isinstance(x, Tensor) else x for x in self._leaves], self._spec)
        leaves, spec = tree.flatten(self.network(*args, **kwargs))
        self._result = [None if isinstance(x, Tensor) else x for x in leaves], spec
        self._places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        return tuple(leaves[i] for i in self._places)

    def rebuilt(self, tensors: tuple[Tensor, ...]) -> Any:
        """The network's result again, around the tensors that a replay returned."""
        leaves = list(self._result[0])
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree.unflatten(leaves, self._result[1])


class BareTraining:
    """torch.cuda.make_graphed_callables on the network, its warm-up undone and nothing of ours: static gradients are handed out as they
    are, and both captures happen where the loss is computed, within autocast. torch demands that autocast keeps no casts then. Batches
    of another shape run eagerly."""

    cache = False
    replays = 2

    def __init__(self, subject: TrainSubject) -> None:
        self._network = subject.network
        self._graphed: Callable[[list[Any]], Any] | None = None
        self._key: Signature | None = None
        self._others = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree.flatten((args, kwargs))
        key = signature([x if isinstance(x, Tensor) else type(x) for x in leaves], spec)
        if self._graphed is None:
            self._graphed, self._key = self._captured(args, kwargs), key
        if key != self._key:
            self._others = True
            return self._network(*args, **kwargs)
        return self._graphed(leaves)

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[list[Any]], Any]:
        if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
            raise CaptureRefused(
                "autocast-cache", "torch.cuda.make_graphed_callables refuses an autocast that keeps its casts of weights"
            )
        network = _OnlyTensors(self._network, args, kwargs)
        traced = _traced(self._network, args, kwargs)
        streams = rng.save()
        gc.collect()  # autograd graphs of earlier steps, whose nodes live on another stream
        more: dict[str, Any] = {}
        if "capture_error_mode" in inspect.signature(torch.cuda.make_graphed_callables).parameters:
            more["capture_error_mode"] = "thread_local"
        sample: Any = tree.leafed(tuple(network.tensors()))
        stream = torch.cuda.current_stream()
        graphed: Any = None
        try:
            with kept(network):
                graphed = torch.cuda.make_graphed_callables(network, sample, allow_unused_input=True, **more)
        except Exception as error:
            torch.cuda.set_stream(stream)
            rng.repair(streams)
            _pass_on(error)
            raise explain(error, traced) from error
        rng.restore(streams)
        return lambda leaves: network.rebuilt(graphed(*(x for x in leaves if isinstance(x, Tensor))))

    def refusal(self) -> CaptureRefused | None:
        return None

    def why(self) -> str:
        return "a batch of another shape or layout than the captured one runs eagerly in this arm" if self._others else ""

    def invalidate(self) -> None:
        self._graphed = None

    def release(self) -> None:
        self._graphed = None


def _pass_on(error: BaseException) -> None:
    """Short memory is not the model's doing."""
    for link in chain(error):
        if isinstance(link, (MemoryError, torch.OutOfMemoryError)):
            raise link


def _traced(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """What a forward of the network does that a graph cannot record; side effects undone."""
    leaves, spec = tree.flatten(tree.cloned((args, kwargs)))

    def call(*flat: Any) -> Any:
        positional, named = tree.unflatten(list(flat), spec)
        return network(*positional, **named)

    streams = rng.save()
    try:
        with kept(network):
            found = trace(call, leaves, network)
    finally:
        rng.restore(streams)
    found.result = None
    return found


ARMS: dict[str, Callable[[TrainSubject], TrainArm]] = {
    "eager": EagerTraining,
    "bare": BareTraining,
    "graphed": GraphedTraining,
    "native": NativeTraining,
}
