"""Who waited for whom, on a device that runs eagerly: which streams a capture would have left unjoined, and which never joined it.

Vector clocks: a stream counts what was launched on it and remembers which counts of others it has waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from parity.judge.explain.calls import replaced
from parity.runtime.errors import CaptureRefused

Clock = dict[int, int]


class StreamWatch:
    """The current stream, on entering, is the one that a capture would begin on."""

    def __init__(self, refused: Callable[[CaptureRefused], None]) -> None:
        self._refused = refused
        self._origin = 0
        self._done: Clock = {}
        self._seen: dict[int, Clock] = {}
        self._events: dict[int, tuple[Any, Clock]] = {}
        self._where: dict[int, str] = {}

    def launch(self, name: str, line: str) -> None:
        """An operation starts a kernel on the current stream, at a line of the model."""
        stream = _id(torch.cuda.current_stream())
        joined = stream == self._origin or self._seen.get(stream, {}).get(self._origin, 0) > 0
        if not joined:
            self._refused(CaptureRefused("side-stream", f"{name} runs on a stream that never joined the capture", line))
            return
        self._done[stream] = self._done.get(stream, 0) + 1
        self._where[stream] = line

    @contextmanager
    def entered(self) -> Iterator[StreamWatch]:
        self._origin = _id(torch.cuda.current_stream())
        self._done = {self._origin: 1}  # who waited before this does not belong to the capture
        stream, event = torch.cuda.Stream, torch.cuda.Event
        wait_stream, wait_event, record_event, record, wait = (
            stream.wait_stream, stream.wait_event, stream.record_event, event.record, event.wait
        )  # fmt: skip

        def waits(mine: Any, other: Any) -> Any:
            self._wait(_id(mine), self._clock(_id(other)))
            return wait_stream(mine, other)

        def waits_for_event(mine: Any, event: Any) -> Any:
            self._wait(_id(mine), self._recorded(event))
            return wait_event(mine, event)

        def records(mine: Any, event: Any = None) -> Any:
            made = record_event(mine, event)
            self._events[id(made)] = (made, self._clock(_id(mine)))
            return made

        def is_recorded(event: Any, stream: Any = None) -> Any:
            self._events[id(event)] = (event, self._clock(_id(stream or torch.cuda.current_stream())))
            return record(event, stream) if stream is not None else record(event)

        def is_waited_for(event: Any, stream: Any = None) -> Any:
            self._wait(_id(stream or torch.cuda.current_stream()), self._recorded(event))
            return wait(event, stream) if stream is not None else wait(event)

        with ExitStack() as stack:
            for owner, name, value in (
                (stream, "wait_stream", waits), (stream, "wait_event", waits_for_event), (stream, "record_event", records),
                (event, "record", is_recorded), (event, "wait", is_waited_for),
            ):  # fmt: skip
                stack.enter_context(replaced(owner, name, value))
            yield self
        self._end()

    def _clock(self, stream: int) -> Clock:
        return {**self._seen.get(stream, {}), stream: self._done.get(stream, 0)}

    def _recorded(self, event: Any) -> Clock:
        return self._events.get(id(event), (None, {}))[1]

    def _wait(self, stream: int, clock: Clock) -> None:
        seen = self._seen.setdefault(stream, {})
        for other, count in clock.items():
            seen[other] = max(seen.get(other, 0), count)

    def _end(self) -> None:
        seen = self._seen.get(self._origin, {})
        for stream, count in self._done.items():
            if stream != self._origin and seen.get(stream, 0) < count:
                text = "a side stream has work that the capturing stream never waited for"
                self._refused(CaptureRefused("side-stream", text, self._where[stream]))


def _id(stream: Any) -> int:
    return int(stream.cuda_stream)
