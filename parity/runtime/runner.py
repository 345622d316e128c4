"""GraphRunner: a callable that replays what it could capture and runs the rest eagerly.

A steady call compares one number, builds a small key, copies its inputs into the graph's own, replays, and hands out clones, all in one
function where it can (``steady``). Everything else is slow and rare: the full check of the module (once per outermost ``scope``, at
every call outside of one), the full signature, capture, and the comparison of tensors that were derived from weights.

What it does not do: it never decides whether a family is safe (the allowlist does), it captures no training step, it keeps no more than
``max_graphs`` graphs, and it does not see attributes that Python reads (``invalidate`` after changing one).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parity.runtime import tree
from parity.runtime.capture import HOLDERS, releasing
from parity.runtime.engine import on_device
from parity.runtime.errors import CaptureRefused
from parity.runtime.invalidation import CLOCK, LOCAL, Watch
from parity.runtime.pool import Pool, StreamCaptured
from parity.runtime.record import Entry, cannot, record, retrace
from parity.runtime.signature import Signature, quick, signature
from parity.runtime.steady import MISS, steady
from parity.runtime.validation import differs

__all__ = ["Entry", "GraphRunner", "Info"]

_LOG = logging.getLogger("parity.runtime")
_COUNTED = 1024
"""Signatures whose calls are counted at once."""
_WAITING = "its signature was not called often enough yet"


@dataclass
class Info:
    """What a runner did: signatures captured and their replays; eager calls by reason; captures dropped by reason."""

    captured: dict[str, int] = field(default_factory=dict)
    captures: int = 0
    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


class GraphRunner:
    """Replays ``region`` from CUDA graphs, one per signature.

    ``module``: whose changes are noticed and whose buffers warm-up and capture may not move. ``warmup``: eager calls before a capture,
    the last one traced. ``max_graphs``: further signatures run eager. ``clone_outputs``: hand out clones; without it a result is
    overwritten by the next replay of the same signature. ``pool``: shared with other runners of the same device.
    ``gap``: given the input tensors of a new signature, why no certificate covers it; such a capture must first replay every bit of
    eager. ``slower``: given them, why a capture does not pay; asked where calls are counted before one (``"auto"``).
    """

    def __init__(
        self,
        region: Callable[..., Any],
        module: nn.Module | None = None,
        *,
        warmup: int = 2,
        max_graphs: int = 8,
        clone_outputs: bool = True,
        pool: Callable[[], Pool] | None = None,
        gap: Callable[[list[Tensor]], str] | None = None,
        slower: Callable[[list[Tensor]], str] | None = None,
        name: str = "",
    ) -> None:
        if warmup < 1:
            raise ValueError(f"warmup={warmup}: at least one eager call has to come first, to be traced and to warm libraries up")
        CLOCK.install()
        self.region = region
        self.module = module if module is not None else (region if isinstance(region, nn.Module) else None)
        self.warmup, self.max_graphs, self.clone_outputs = warmup, max_graphs, clone_outputs
        self.name = name or type(self.module if self.module is not None else region).__qualname__
        self._gap, self._slower = gap, slower
        self._new_pool = pool
        self._pools: dict[int, Pool] = {}
        self._entries: dict[Signature, Entry] = {}
        self._quick: dict[Hashable, tuple[Entry, Any]] = {}
        self._epoch = 0  # another once what was looked up before may be gone
        self._shortcut: tuple[Any, int] = (None, 0)  # of the last call, and its epoch
        self._refused: dict[Signature, CaptureRefused] = {}
        self._counts: OrderedDict[Signature, int] = OrderedDict()
        self._watch = Watch(self.module) if self.module is not None else None
        self._flags: Any = (self._watch.training, self._watch.grads) if self._watch is not None else None
        self._visit = self._changes = -1
        self._lock = threading.RLock()
        self._logged: set[str] = set()
        self._info = Info()
        HOLDERS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        visit = LOCAL.visit
        if LOCAL.busy:
            return self.region(*args, **kwargs)
        if visit == 0 or visit != self._visit or CLOCK.changes != self._changes:
            self._inspect(visit)
        shortcut, epoch = self._shortcut  # once: another thread may change it
        if shortcut is not None and epoch == self._epoch and len(args) == 1 and not kwargs:
            result = shortcut(args[0])
            if result is not MISS:
                self._info.replays += 1
                return result
        leaves = (*args, *kwargs.values()) if kwargs else args
        key, epoch = quick(leaves, tuple(kwargs) if kwargs else ()), self._epoch
        entry, shortcut = self._quick.get(key, (None, None))
        self._shortcut = shortcut if entry is not None and entry.copies is not None else None, epoch
        if entry is None or torch.cuda.is_current_stream_capturing() or (entry.derived is not None and entry.doubtful()):
            return self._call(args, kwargs, key)
        return self._replay(entry, leaves, args, kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Captures the signature of this call now, if it is not captured yet. Raises CaptureRefused with cause and source line."""
        self._inspect(LOCAL.visit)
        leaves, spec = tree.flatten((args, kwargs))
        if reason := cannot(leaves, self.module):
            raise CaptureRefused("unknown", reason)
        key = signature(leaves, spec, self._training())
        if key not in self._entries:
            if len(self._entries) >= self.max_graphs:
                raise CaptureRefused("unknown", f"more than {self.max_graphs} signatures")
            self._capture(key, leaves, spec)

    def info(self) -> Info:
        self._info.captured = captured = {}
        for i, (key, entry) in enumerate(self._entries.items(), 1):  # modes, strides and scalars are not in the words of a key
            captured[f"{key} ({i})" if str(key) in captured else str(key)] = entry.replays
        return self._info

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def refusals(self) -> list[CaptureRefused]:
        return list(self._refused.values())

    def release(self, reason: str = "released") -> None:
        """Drops all graphs and what they hold. Results already handed out stay. Raises StreamCaptured, with nothing dropped."""
        with self._lock:
            for pool in {id(e.pool): e.pool for e in self._entries.values()}.values():
                pool.drain()
            if self._entries:
                self._info.dropped[reason] += len(self._entries)
            self._entries.clear()
            self._forget()
            self._refused.clear()
            self._pools.clear()

    def _forget(self) -> None:
        """What is looked up by a quick key. The epoch moves last: who saw the new one cannot have found what is gone."""
        with self._lock:
            self._quick.clear()
            self._shortcut = None, self._epoch
            self._epoch += 1

    def invalidate(self, reason: str) -> None:
        """To be called after changing what the region computes in a way that nobody can see: an attribute, a hook, a flag."""
        self.release(reason)

    def _training(self) -> tuple[bool, ...]:
        return () if self._watch is None else self._watch.training

    def _eager(self, reason: str, args: Any, kwargs: Any) -> Any:
        self._info.eager[reason] += 1
        if reason not in self._logged and reason != _WAITING:
            self._logged.add(reason)
            _LOG.warning("cuda_graph: %s runs eager: %s", self.name, reason)
        return self.region(*args, **kwargs)

    def _replay(self, entry: Entry, leaves: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = entry.replay(leaves)
        except StreamCaptured as reason:
            return self._eager(str(reason), args, kwargs)
        self._info.replays += 1
        return result

    # ------------------------------------------------------------ the slow path
    def _call(self, args: Any, kwargs: Any, quick_key: Hashable) -> Any:
        epoch = self._epoch
        leaves, spec = tree.flatten((args, kwargs))
        if reason := cannot(leaves, self.module):
            return self._eager(reason, args, kwargs)
        key = signature(leaves, spec, self._training())
        entry = self._entries.get(key)
        if entry is not None and entry.doubtful():
            return self._renew(key, entry, args, kwargs)
        if entry is None:
            if key in self._refused:
                return self._eager(f"refused: {self._refused[key].cause}: {self._refused[key].message}", args, kwargs)
            if len(self._entries) >= self.max_graphs:
                return self._eager(f"more than {self.max_graphs} signatures", args, kwargs)
            if self._count(key) < LOCAL.after:
                return self._eager(_WAITING, args, kwargs)
            if LOCAL.after > 1 and self._slower and (reason := self._slower([x for x in leaves if isinstance(x, Tensor)])):
                return self._eager(reason, args, kwargs)
            try:
                entry = self._capture(key, leaves, spec)
            except CaptureRefused as refusal:
                self._refused[key] = refusal.with_traceback(None)  # whose frames hold what was captured
                return self._eager(f"refused: {refusal.cause}: {refusal.message}", args, kwargs)
        if quick_key is not None:
            alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
            with self._lock:
                if epoch == self._epoch:
                    self._quick[quick_key] = entry, steady(entry, args[0]) if alone else None
        return self._replay(entry, leaves, args, kwargs)

    def _count(self, key: Signature) -> int:
        count = self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > _COUNTED:
            self._counts.popitem(last=False)
        return count

    def _capture(self, key: Signature, leaves: list[Any], spec: Any) -> Entry:
        with releasing():
            return self._capture_locked(key, leaves, spec)

    def _capture_locked(self, key: Signature, leaves: list[Any], spec: Any) -> Entry:
        with self._lock, torch.cuda.device(next((x.device for x in leaves if isinstance(x, Tensor) and on_device(x)), None)):
            if key in self._entries:  # another thread was first
                return self._entries[key]
            gap = self._gap([x for x in leaves if isinstance(x, Tensor)]) if self._gap is not None else ""
            self._warn_unused(key)
            index = torch.cuda.current_device()
            if index not in self._pools:
                self._pools[index] = self._new_pool() if self._new_pool is not None else Pool()
            entry = record(self.region, self.module, leaves, spec, self._pools[index], warmup=self.warmup, clone=self.clone_outputs)
            if gap and (what := differs(entry, self.region, self.module, leaves, spec)):
                raise CaptureRefused("unknown", f"{gap}, and its first use did not validate: {what}")
            entry.weights, entry.clock = self._versions(), CLOCK.weights
            self._info.captures += 1
            self._entries[key] = entry
            return entry

    def _warn_unused(self, key: Signature) -> None:
        unused = [str(k) for k, e in self._entries.items() if e.early and not e.replays]
        if unused and "unused" not in self._logged:
            self._logged.add("unused")
            _LOG.warning(
                "cuda_graph: %s captures %s, but what capture_graph() captured was never used: %s. Give it the size, batch and dtype "
                "that calls really have.",
                self.name,
                key,
                "; ".join(unused),
            )

    # ------------------------------------------------------------ what changed
    def _inspect(self, visit: int) -> None:
        """The full check."""
        changes = CLOCK.changes
        if self._watch is not None:
            if what := self._watch.look():
                self.release(what)
            flags = (self._watch.training, self._watch.grads)
            if flags != self._flags:
                self._flags = flags
                self._forget()
        self._suspect()
        self._visit, self._changes = visit, changes

    def _suspect(self) -> None:
        derived = [(key, entry) for key, entry in self._entries.items() if entry.derived is not None]
        if not derived:
            return
        versions = self._versions()
        for key, entry in derived:
            if entry.clock != CLOCK.weights or entry.weights != versions:
                self._drop(key, "it read something derived from weights, and weights may have changed")
            elif entry.derived is not None and (versions is None or entry.derived.replaced()):
                entry.doubt = True

    def _versions(self) -> int | None:
        return 0 if self._watch is None else self._watch.versions()

    def _drop(self, key: Signature, reason: str) -> None:
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                entry.pool.drain()
                del self._entries[key]
                self._info.dropped[reason] += 1
                self._forget()

    def _renew(self, key: Signature, entry: Entry, args: Any, kwargs: Any) -> Any:
        """An eager call, in which the owner of a derived tensor renews it; the graph stays if that gave the same bits."""
        result = self._eager("a tensor that the graph reads was replaced", args, kwargs)
        leaves, spec = tree.flatten((args, kwargs))
        traced = retrace(self.region, self.module, leaves, spec)
        if entry.derived is not None and entry.derived.renew(traced.reads):
            entry.doubt = False
        else:
            self._drop(key, "a tensor it read was replaced by another")
        return result
