"""What an arm really captured and replayed: counted where graphs are captured and launched, never taken from the arm's word."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from parity.runtime import cudart


class Watch:
    """Counts captures and replays (torch's, and what the runtime launches) while entered, and keeps the graphs captured. ``profiler``:
    a context manager factory entered around the first capture (kernels that execute while it lasts are not in the graph), or None.
    ``around_replay``: entered around every replay."""

    def __init__(self, profiler: Any = None) -> None:
        self.captures = 0
        self.replays = 0
        self.graphs: list[Any] = []
        self.profiler = profiler
        self.around_replay: Callable[[], AbstractContextManager[None]] = nullcontext
        self.executed: list[str] = []

    @contextmanager
    def entered(self) -> Iterator[Watch]:
        kind: Any = torch.cuda.CUDAGraph
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay
        runtime = cudart.loaded()
        launch = runtime.launch if runtime is not None else None
        open_profilers: dict[int, Any] = {}
        watch = self

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            if watch.profiler is not None and watch.captures == 0:
                open_profilers[id(graph)] = watch.profiler()
                open_profilers[id(graph)].start()
            try:
                begin(graph, *args, **kwargs)
            except BaseException:
                close(graph)
                raise

        def capture_end(graph: Any) -> None:
            try:
                end(graph)
            finally:
                close(graph)
            watch.captures += 1
            watch.graphs.append(graph)

        def close(graph: Any) -> None:
            profiler = open_profilers.pop(id(graph), None)
            if profiler is not None:
                watch.executed += profiler.stop()

        def counted_replay(graph: Any) -> None:
            watch.replays += 1
            with watch.around_replay():
                replay(graph)

        def counted_launch(executable: int, stream: int) -> int:
            watch.replays += 1
            with watch.around_replay():
                assert launch is not None
                return launch(executable, stream)

        kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, counted_replay
        if runtime is not None:
            runtime.launch = counted_launch
        try:
            yield self
        finally:
            kind.capture_begin, kind.capture_end, kind.replay = begin, end, replay
            if runtime is not None and launch is not None:
                runtime.launch = launch

    def forget(self) -> None:
        self.graphs.clear()


def live_tensors() -> list[Tensor]:
    """Every tensor that some Python object still holds."""
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
