"""Streams and events. Work runs at once, in program order; what is kept is who waited for whom, because a capture must be joined."""

from __future__ import annotations

import itertools
import time
from types import TracebackType
from typing import Any

import torch

from parity.runtime.legality import Violation

from .state import CUDA, STATE

_numbers = itertools.count(0)
# the originals, taken before anything is patched: the legality table knows them
_STREAM, _EVENT = torch.cuda.Stream, torch.cuda.Event
_SYNC = {
    "stream": _STREAM.synchronize,
    "stream_query": _STREAM.query,
    "event": _EVENT.synchronize,
    "event_query": _EVENT.query,
    "elapsed": _EVENT.elapsed_time,
}


class Stream:
    """Counts what a capture launched on it (``done``) and which counts of other streams it has waited for (``seen``)."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = CUDA
        self.device_index = 0
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_numbers)
        self.done = 0
        self.seen: dict[Stream, int] = {}
        self.where = ""  # the line that launched the last captured work
        self._scopes: list[StreamContext] = []

    def clock(self) -> dict[Stream, int]:
        return {**self.seen, self: self.done}

    def wait_for(self, clock: dict[Stream, int]) -> None:
        for stream, count in clock.items():
            self.seen[stream] = max(self.seen.get(stream, -1), count)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.note(stream)
        self.await_(event)

    def wait_event(self, event: Event) -> None:
        self.await_(event)

    def await_(self, event: Event) -> None:
        """In a capture, as CUDA has it: no stream of the capture waits for work outside of it, and the default stream for none within.
        An event that was never recorded is no work."""
        graph = STATE.graph
        if graph is not None and event.time is not None:
            within = event.capture == graph.tape.number
            if graph.captures(self) and not within:
                STATE.refuse(Violation("side-stream", "a stream of the capture waits for work outside of it"))
            elif within and self is STATE.default:
                STATE.refuse(Violation("side-stream", "the default stream waits for work of the capture"))
        self.wait_for(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        STATE.refuse_call(_SYNC["stream"], (self,))

    def query(self) -> bool:
        STATE.refuse_call(_SYNC["stream_query"], (self,))
        return True

    def is_capturing(self) -> bool:
        return STATE.graph is not None and STATE.graph.captures(self)

    def __enter__(self) -> Stream:
        self._scopes.append(StreamContext(self))
        self._scopes[-1].__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._scopes.pop().__exit__(*exc)

    def __repr__(self) -> str:
        return f"<emulated torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> None:
        self.device = CUDA
        self.enable_timing = enable_timing
        self.clock: dict[Stream, int] = {}
        self.time: float | None = None
        self.capture = 0  # the number of the tape that it was recorded for

    def record(self, stream: Stream | None = None) -> None:
        self.note(stream or STATE.stream)

    def note(self, stream: Stream) -> None:
        self.clock = stream.clock()
        self.time = time.perf_counter()
        self.capture = STATE.graph.tape.number if STATE.graph is not None and STATE.graph.captures(stream) else 0

    def wait(self, stream: Stream | None = None) -> None:
        (stream or STATE.stream).wait_event(self)

    def synchronize(self) -> None:
        STATE.refuse_call(_SYNC["event"], (self,))

    def query(self) -> bool:
        STATE.refuse_call(_SYNC["event_query"], (self,))
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of wall clock between the two records."""
        STATE.refuse_call(_SYNC["elapsed"], (self, end_event))
        if self.time is None or end_event.time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event.time - self.time) * 1000


class StreamContext:
    """``with torch.cuda.stream(s)``. None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.outer: Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.outer, STATE.stream = STATE.stream, self.stream
            STATE.scopes.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.outer is not None:
            STATE.stream, self.outer = self.outer, None
            STATE.scopes.remove(self)


def leave_scope_of(stream: Stream) -> None:
    """torch.cuda.graph does not leave its stream when the end of a capture raises: do it here, so that the device stays usable."""
    if STATE.scopes and STATE.scopes[-1].stream is stream:
        STATE.scopes[-1].__exit__(None, None, None)


def set_stream(stream: Stream) -> None:
    STATE.stream = stream


STATE.default = STATE.stream = Stream()
