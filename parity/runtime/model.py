"""CudaGraphModel: what a zoo's base class inherits to have ``cuda_graph=``, ``capture_graph``, ``graph_info``, ``release_graphs``."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from parity.runtime.allowlist import Certificate, Environment, gap, is_slower
from parity.runtime.errors import NotCertified
from parity.runtime.identity import Identity, here
from parity.runtime.seams import BoundSeam, Seam

_LOG = logging.getLogger("parity.runtime")
_AUTO: Final = 3
"""The call of a shape at which ``"auto"`` captures it."""


def calls_before_capture(mode: Any) -> int:
    """0 for False, 1 for True, 3 for "auto". Raises ValueError for anything else."""
    if mode is False or mode is True:
        return int(mode)
    if isinstance(mode, str) and mode == "auto":
        return _AUTO
    raise ValueError(f'cuda_graph={mode!r}: it is False, True or "auto"')


def _extent(tensors: list[Tensor]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """What certificates know calls by: shapes of all tensors, and the dtype of the first one in floating point."""
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    return tuple(tuple(t.shape) for t in tensors), str(dtype).removeprefix("torch.")


def _weakly(method: Callable[[list[Tensor]], str]) -> Callable[[list[Tensor]], str]:
    """Asks a model that the graphs do not keep: with the last reference to it, its memory is free."""
    found = weakref.WeakMethod(method)

    def ask(tensors: list[Tensor]) -> str:
        bound = found()
        return bound(tensors) if bound is not None else "the model is gone"

    return ask


class _Graphs:
    """What a model keeps for its graphs. Never copied, never pickled: a copy of the model starts without any."""

    def __init__(self) -> None:
        self.seam: BoundSeam | None = None
        self.root: Any = None
        self.lock = threading.RLock()
        self.logged: set[str] = set()
        self.slower: dict[Any, str] = {}

    def __deepcopy__(self, memo: Any) -> _Graphs:
        return _Graphs()

    def __reduce__(self) -> Any:
        return _Graphs, ()


class CudaGraphModel:
    """A mixin. The class says which certificate is its own (``cuda_graph_zoo``, ``cuda_graph_family``, ``cuda_graph_task``,
    ``cuda_graph_version``; each may be a property) and keeps its network in ``model``, or overrides ``cuda_graph_root``.

    ``cuda_graph_allowlist``: a path; by default the packaged one. ``cuda_graph_policy``: ``"validate"`` lets what no certificate covers
    prove itself at first use, ``"strict"`` refuses it. ``cuda_graph_seam``: where the forward is cut.
    """

    cuda_graph_zoo: str = ""
    cuda_graph_family: str = ""
    cuda_graph_task: str = ""
    cuda_graph_version: str = ""
    cuda_graph_allowlist: ClassVar[str | Path | None] = None
    cuda_graph_policy: str = "validate"
    cuda_graph_seam: Seam = Seam()

    # ------------------------------------------------------------ what a zoo may override
    def cuda_graph_root(self) -> Any:
        """The object that the seam's paths start from."""
        return self.model  # type: ignore[attr-defined]

    def cuda_graph_example(self, imgsz: Any = None, batch: int = 1, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """Arguments of a forward on the model's device. Raises ValueError where no size is known."""
        size = imgsz if imgsz is not None else getattr(self, "imgsz", None)
        if size is None:
            raise ValueError("capture_graph needs imgsz: this model does not say which size it is used at")
        height, width = (size, size) if isinstance(size, int) else size
        weight = next((p for p in self.cuda_graph_root().parameters() if p.is_floating_point()), None)
        device = weight.device if weight is not None else torch.device("cuda")
        kind = dtype or (weight.dtype if weight is not None else torch.float32)
        return (torch.zeros(batch, 3, height, width, dtype=kind, device=device),)

    def cuda_graph_forward(self, *args: Any) -> Any:
        """A forward as predictions run it: their grad mode and autocast are part of what a graph is captured for."""
        with torch.inference_mode():
            return self.cuda_graph_root()(*args)

    # ------------------------------------------------------------ what users call
    @property
    def SUPPORTS_CUDA_GRAPH(self) -> bool:  # noqa: N802  (the name zoos know)
        """Whether the allowlist holds this family at this task."""
        return self._certificate() is not None

    @contextmanager
    def cuda_graph_scope(self, cuda_graph: Any = True) -> Iterator[None]:
        """Forwards of this thread within it are captured and replayed. Raises ValueError for an unknown mode and NotCertified for a
        family, task or mode that the allowlist does not hold."""
        after = calls_before_capture(cuda_graph)
        if after == 0 and self._graphs.seam is None:
            yield
            return
        if after:
            self._require()
        if after and not torch.cuda.is_available():
            self._once("no CUDA device is available")
            yield
            return
        with self._bound().scope(after):
            yield

    def cuda_graph_steps(self, steps: Iterable[Any], cuda_graph: Any = True) -> Generator[Any, None, None]:
        """Items of a generator (frames of a video), each computed within a scope though the call that made it has returned."""
        if calls_before_capture(cuda_graph):
            self._require()  # refuses before the first step
        return self._steps(steps, cuda_graph)

    def _steps(self, steps: Iterable[Any], cuda_graph: Any) -> Generator[Any, None, None]:
        source = iter(steps)
        try:
            while True:
                with self.cuda_graph_scope(cuda_graph):
                    try:
                        item = next(source)
                    except StopIteration:
                        return
                yield item
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    def capture_graph(self, imgsz: Any = None, batch: int = 1, dtype: torch.dtype | None = None) -> None:
        """Captures ahead of the first request."""
        with self.cuda_graph_scope(True):
            args = self.cuda_graph_example(imgsz, batch, dtype)
            seam = self._graphs.seam
            known = {id(e) for r in seam.runners.values() for e in r.entries()} if seam is not None else set()
            self.cuda_graph_forward(*args)
            for runner in seam.runners.values() if seam is not None else ():
                for entry in runner.entries():
                    if id(entry) not in known:
                        entry.early, entry.replays = True, 0

    def graph_info(self) -> dict[str, Any]:
        """``pieces``: per path what was captured with its replays, eager calls by reason, dropped graphs by reason. ``memory``: bytes
        of the graphs' pools (0 where the allocator does not tell) and of their static inputs."""
        seam = self._graphs.seam
        pieces: dict[str, Any] = {}
        pools: set[tuple[int, ...]] = set()
        inputs = 0
        for path, runner in seam.runners.items() if seam is not None else ():
            info = runner.info()
            pieces[path] = {
                "captured": dict(info.captured),
                "captures": info.captures,
                "replays": info.replays,
                "eager": dict(info.eager),
                "dropped": dict(info.dropped),
            }
            for entry in runner.entries():
                pools.add(tuple(entry.pool.handle))
                inputs += sum(x.untyped_storage().nbytes() for x in entry.inputs if isinstance(x, Tensor))
        segments = torch.cuda.memory_snapshot() if pools else []
        held = sum(int(s["total_size"]) for s in segments if tuple(s.get("segment_pool_id", ())) in pools)
        return {
            "family": str(self._identity()),
            "policy": self.cuda_graph_policy,
            "pieces": pieces,
            "memory": {"pools": held, "inputs": inputs},
        }

    def release_graphs(self) -> None:
        """Drops all graphs and their memory. The next forward in a scope captures again."""
        if self._graphs.seam is not None:
            self._graphs.seam.release()

    def invalidate_graphs(self, reason: str) -> None:
        """After a change that nobody can see from outside: an attribute that the forward reads, a hook."""
        if self._graphs.seam is not None:
            self._graphs.seam.release(reason)

    # ------------------------------------------------------------ inside
    @property
    def _graphs(self) -> _Graphs:
        return vars(self).setdefault("_cuda_graphs", _Graphs())  # type: ignore[no-any-return]

    def _identity(self) -> Identity:
        zoo, family, task = self.cuda_graph_zoo, self.cuda_graph_family, self.cuda_graph_task
        return Identity(zoo, family, task, "inference", self.cuda_graph_version)

    def _environment(self) -> Environment:
        return here(self.cuda_graph_version)

    def _certificate(self) -> Certificate | None:
        return self._identity().certificate(self.cuda_graph_allowlist)

    def _require(self) -> Certificate:
        if self.cuda_graph_policy not in ("validate", "strict"):
            raise ValueError(f'cuda_graph_policy={self.cuda_graph_policy!r}: it is "validate" or "strict"')
        found = self._certificate()
        if found is None:
            raise NotCertified(f"cuda_graph: {self._identity().unlisted(self.cuda_graph_allowlist)}; until then leave cuda_graph=False")
        return found

    def _gap(self, tensors: list[Tensor]) -> str:
        """Why the certificate does not cover a call. Raises NotCertified instead under the strict policy."""
        found = gap(self._require(), self._environment(), *_extent(tensors))
        if found and self.cuda_graph_policy == "strict":
            command = self._identity().command
            raise NotCertified(f'cuda_graph: {found}, and policy="strict" does not validate; to certify it: `{command}`')
        return found

    def _slower(self, tensors: list[Tensor]) -> str:
        """Why ``"auto"`` does not capture a call, which it otherwise would."""
        shapes, dtype = _extent(tensors)
        known = self._graphs.slower
        if (shapes, dtype) not in known:
            certificate, environment = self._require(), self._environment()
            told = f'{certificate.id} was measured to be faster eagerly at these shapes: cuda_graph="auto" does not capture them'
            known[shapes, dtype] = told if is_slower(certificate, environment, shapes, dtype) else ""
        return known[shapes, dtype]

    def _bound(self) -> BoundSeam:
        graphs, root = self._graphs, self.cuda_graph_root()
        with graphs.lock:
            if graphs.seam is None or graphs.root is not root:
                gap, slower = _weakly(self._gap), _weakly(self._slower)
                graphs.seam, graphs.root = self.cuda_graph_seam.bind(root, gap, slower=slower), root
            return graphs.seam

    def _once(self, reason: str) -> None:
        if reason not in self._graphs.logged:
            self._graphs.logged.add(reason)
            _LOG.warning("cuda_graph: %s runs eager: %s", self._identity(), reason)
