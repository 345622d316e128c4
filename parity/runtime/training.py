"""TrainGraphs: a network inside a training step, replayed from CUDA graphs with the bits that eager gives.

The first steps of a signature run eagerly and tell how the gradients of the outputs arrive. Then forward and backward are captured, one
pair per signature and layout of those gradients. Loss, optimizer, scaler, clipping and averages stay the caller's.

What it does not do: it keeps no second set of activations (a forward whose predecessor still waits for its backward runs eagerly), it
does not see a weight, or a tensor of the step, that both the network and the eager rest use (its gradients add up in another order),
and it captures nothing in distributed runs.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity.runtime import tree
from parity.runtime.backward import Recording, reads, record_step
from parity.runtime.capture import HOLDERS, releasing, unfit
from parity.runtime.engine import on_device
from parity.runtime.errors import ParityError
from parity.runtime.gradients import ODD, Layout
from parity.runtime.identity import Identity, trained_gap
from parity.runtime.invalidation import CLOCK, LOCAL, Watch
from parity.runtime.pool import Pool
from parity.runtime.signature import Signature, signature
from parity.runtime.step import EagerStep, Known, Step, replayed, unplayable

_LOG = logging.getLogger("parity.runtime")
_Layouts = tuple[Layout, ...]
_OPEN = 4
"""Eager steps at once whose backward is still awaited."""
_COUNTED = 1024
"""Signatures that are remembered without being captured."""
_GUESSES = 8
"""Steps in a row whose gradients came in another layout than the one before, until their signature stays eager."""


class TrainGraphs:
    """In place of ``network`` in a training step. Without gradients it is the network.

    ``threshold``: eager steps of a signature before it is captured. ``max_graphs``: further signatures stay eager. ``log``: receives
    the one line that says why a run goes on eagerly; default a warning of the logger ``parity.runtime``. ``enabled=False``, a
    distributed run, a failure: eager from then on, with eager's numbers.

    ``identity``: whose certificate decides; without one nothing does. A family that the allowlist (a path; by default the packaged one)
    does not hold trains eagerly. What its certificate does not cover proves itself at first use, forward and gradients against an eager
    step from the same state; ``policy="strict"`` leaves it eager instead.

    A backward that has to run eagerly after its state was overwritten raises StaleGraph; a sticky CUDA error passes through.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        threshold: int = 3,
        max_graphs: int = 4,
        log: Callable[[str], None] | None = None,
        enabled: bool = True,
        identity: Identity | None = None,
        allowlist: str | Path | None = None,
        policy: str = "validate",
    ) -> None:
        if policy not in ("validate", "strict"):
            raise ValueError(f'policy={policy!r}: it is "validate" or "strict"')
        if threshold < 1:
            raise ValueError(f"threshold={threshold}: at least one eager step has to tell how gradients arrive")
        CLOCK.install()
        self.network = network
        self.threshold = threshold
        self.max_graphs = max_graphs
        self.name = type(network).__qualname__
        self.captures = 0
        self.replays = 0
        self.reason = ""
        """Why the run is eager for good; empty while it is not."""
        self.eager: Counter[str] = Counter()
        self._log = log or _LOG.warning
        self._epoch = 0
        self._lock = threading.RLock()
        self._watch = Watch(network)
        self._seen: tuple[tuple[bool, ...], ...] = ()
        self._number = 0
        self._numbers: dict[tuple[tuple[bool, ...], ...], int] = {}
        self._pool: Pool | None = None
        self._pending: weakref.ref[Step] | None = None
        self._cloning = False
        self._clear()
        HOLDERS.add(self)  # a failed capture anywhere in the process releases these graphs too
        self.policy = policy
        self._version = "" if identity is None else identity.version
        self._certificate = identity.certificate(allowlist) if identity is not None else None
        if not enabled:
            self._stop("it was not enabled")
        elif identity is not None and self._certificate is None:
            self._stop(identity.unlisted(allowlist))

    def _clear(self) -> None:
        self._recordings: dict[tuple[Signature, _Layouts], Recording] = {}
        self._expected: dict[Signature, _Layouts] = {}
        self._counts: Counter[tuple[Signature, _Layouts]] = Counter()
        self._wrong: Counter[Signature] = Counter()
        self._renewed: Counter[Signature] = Counter()
        self._known: dict[Signature, Known] = {}
        self._said: dict[Signature, str] = {}
        self._open: list[EagerStep] = []
        self._replayed: list[tuple[int, Signature, bool]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reason or LOCAL.busy or not torch.is_grad_enabled():
            return self.network(*args, **kwargs)
        with self._lock:
            return self._call(args, kwargs)

    def invalidate(self, reason: str) -> None:
        """To be called after changing what the network computes in a way that nobody can see. The counting starts again."""
        self.release(reason)

    def release(self, reason: str = "released") -> None:
        """Drops all graphs. A step whose backward is still to come keeps its own."""
        with self._lock:
            if self._pool is not None:
                self._pool.drain()
            self._epoch += 1
            self._pool = None
            self._clear()

    def _stop(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self._log(f"cuda_graph: {self.name} trains eagerly from here on: {reason}")
            self._clear()

    def _fail(self, reason: str, error: BaseException) -> None:
        """The rest of the run is eager; raises where not even that is possible."""
        try:
            torch.cuda.synchronize()
        except Exception as sticky:
            self._log(f"cuda_graph: {self.name}: no fallback exists, the CUDA context is lost: {reason}")
            raise sticky from error
        self._stop(reason)

    def _cannot(self, leaves: list[Any]) -> str:
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "torch.distributed is initialised"
        if not tensors or not all(map(on_device, tensors)):
            return "an input is not on a CUDA device"
        return unfit(leaves)

    def _call(self, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree.flatten((args, kwargs))
        if reason := self._cannot(leaves):
            self._stop(reason)
            return self.network(*args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            return self.network(*args, **kwargs)
        if what := self._watch.look():
            self.release(what)
        self._listen()
        key = signature(leaves, spec, self._flags())
        waiting = self._pending() if self._pending is not None else None
        if waiting is not None and not waiting.done:
            return self._run_eager(key, args, kwargs, leaves, "the forward before still waits for its backward")
        device = next(x.device for x in leaves if isinstance(x, Tensor))
        with torch.cuda.device(device):
            recording, why = self._find(key, leaves, spec)
            derived = None if recording is None else recording.derived
            if recording is not None and derived is not None and (derived.superseded() or derived.replaced()):
                result = self._run_eager(key, args, kwargs, leaves, "a tensor that the graph reads was replaced")
                self._renew(key, recording, leaves, spec)
                return result
            if recording is None:
                return self._run_eager(key, args, kwargs, leaves, why)
            if recording.hooked(leaves):
                return self._run_eager(key, args, kwargs, leaves, "a hook may lie where some backward gives no gradient")
            return self._replay(Step(self, recording, key, args, kwargs, leaves))

    def _flags(self) -> Any:
        """A number for the flags of all submodules and parameters: hundreds of them in a key would be hashed at every look-up."""
        flags = self._watch.training, self._watch.grads
        if flags != self._seen:
            self._seen, self._number = flags, self._numbers.setdefault(flags, len(self._numbers))
        return (self._number,)

    def _find(self, key: Signature, leaves: list[Any], spec: Any) -> tuple[Recording | None, str]:
        layouts = self._expected.get(key)
        if key in self._said:
            return None, self._said[key]
        if self._wrong[key] >= _GUESSES or self._renewed[key] > 1:
            return None, "its gradients, or tensors that it reads, change from step to step"
        if layouts is None or ODD in layouts:
            return None, "no backward of its signature was seen yet, or only one inside autocast or with gradients that are not plain"
        found = self._recordings.get((key, layouts))
        if found is None:
            unheard = (known := self._known.get(key)) is not None and bool(known.inner)  # the first step, which told who listens
            if self._counts[key, layouts] < max(1, self.threshold - unheard):
                return None, "its signature was not seen often enough yet"
            if len(self._recordings) >= self.max_graphs:
                return None, f"more than {self.max_graphs} graphs"
            return self._capture(key, layouts, leaves, spec)
        return found, ""

    def _capture(self, key: Signature, layouts: _Layouts, leaves: list[Any], spec: Any) -> tuple[Recording | None, str]:
        missing = "" if self._certificate is None else trained_gap(self._certificate, leaves, self._version)
        if missing and self.policy == "strict":
            return None, f'{missing}, and policy="strict" does not validate'
        try:
            if self._pool is None:
                self._pool = Pool()
            with releasing():
                made = record_step(self.network, leaves, spec, layouts, self._pool, cloning=self._cloning)
        except Exception as error:
            said = str(error) if isinstance(error, ParityError) else f"{type(error).__name__}: {error}"
            self._fail(f"it cannot be captured: {said}", error)
            return None, "refused"
        self.captures += 1
        made.gap = missing
        self._recordings[key, layouts] = made
        return made, ""

    def _renew(self, key: Signature, recording: Recording, leaves: list[Any], spec: Any) -> None:
        """The owner of a tensor that the graph reads has renewed it by now: the graph stays if that gave the same bits."""
        if recording.derived is not None and not recording.derived.renew(reads(self.network, leaves, spec)):
            self._renewed[key] += 1
            self._drop(recording)

    def _drop(self, recording: Recording) -> None:
        recording.pool.drain()
        self._recordings = {k: r for k, r in self._recordings.items() if r is not recording}

    def _replay(self, step: Step) -> Any:
        r = step.recording
        try:
            made = replayed(step)
            result = r.outputs.build(made, step.leaves)
        except Exception as error:
            self._fail(f"a replay failed: {type(error).__name__}: {error}", error)
            step.undo()
            return self.network(*step.args, **step.kwargs)
        if r.gap and (what := step.unlike_eager(made)):
            self._stop(f"{r.gap}, and its first use did not validate: {what}")
            step.undo()
            return self.network(*step.args, **step.kwargs)
        self.replays += 1
        self._pending = weakref.ref(step)
        return result

    def _run_eager(self, key: Signature, args: Any, kwargs: Any, leaves: list[Any], why: str) -> Any:
        self.eager[why] += 1
        result = self.network(*args, **kwargs)
        captured = {k for k, _ in self._recordings}
        many = len(self._recordings) >= self.max_graphs and key not in captured
        if self.reason or key in self._said or self._wrong[key] >= _GUESSES or many:
            return result
        if len(self._known) >= _COUNTED:
            self._forget(captured)
        step = EagerStep(key, result, leaves, self._known.get(key))
        self._known[key] = step.known
        self._open = [*self._open[1 - _OPEN :], step]
        result, step.result = step.result, None
        return result

    def _forget(self, but: set[Signature]) -> None:
        """A run whose every batch has a shape of its own must not fill the memory."""
        every: tuple[dict[Signature, Any], ...] = self._expected, self._known, self._wrong, self._renewed, self._said
        for kept, old in [(one, k) for one in every for k in one if k not in but]:
            del kept[old]
        self._counts = Counter({k: n for k, n in self._counts.items() if k[0] in but})
        self._open.clear()

    def _listen(self) -> None:
        """What the eager steps told since the last call."""
        heard = [s for s in self._open if s.heard]
        if said := {k: why for k, why in unplayable(heard, self._replayed).items() if k not in self._said}:
            self._log(f"cuda_graph: {self.name}: {next(iter(said.values()))}: such steps run eagerly from here on")
            self._said |= said
        for step in heard:
            self._open.remove(step)
            if step.counts:
                self._heard(step.key, tuple(step.layouts))

    def _heard(self, key: Signature, layouts: _Layouts) -> None:
        if self._expected.get(key, layouts) != layouts:
            self._wrong[key] += 1
        elif self._wrong[key] < _GUESSES:
            self._wrong[key] = 0
        self._counts[key, layouts] += 1
        known = self._expected.get(key)
        if known is None or (key, known) not in self._recordings or self._counts[key, layouts] >= self.threshold:
            self._expected[key] = layouts  # until a layout is worth a capture, an odd step is cheaper redone than two run eagerly
