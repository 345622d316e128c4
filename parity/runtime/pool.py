"""Graphs that share memory never overlap: one after the other on the host, and on the device whatever streams they are replayed on.

Replays from one stream follow each other by the order of that stream, so nothing is recorded or waited for. When another stream comes,
an event is recorded on the old one, behind everything queued there, and the new one waits for it. A stream that is not torch's own may
be destroyed by then, or be another one under the same number (CUDA's per-thread default stream): behind a replay on such a one an event
is recorded at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from parity.runtime.errors import ParityError

CAPTURES: Final = threading.RLock()
"""One capture at a time in this process: they share the default generator."""


class StreamCaptured(ParityError, RuntimeError):
    """The stream of the last replays is being captured by somebody else. What was queued there before cannot be waited for: an event
    that is recorded there becomes part of the capture, and so would whoever waits for it."""


def _current() -> Callable[[int], Any]:
    """What tells the current stream of a device from its others: CUDA's own number, where torch has it, at a tenth of the cost of a
    stream object."""
    if isinstance(torch.cuda.current_stream(), torch._C._CudaStreamBase):
        return torch._C._cuda_getCurrentRawStream
    return torch.cuda.current_stream


def _lasts(stream: Any) -> bool:
    """Whether torch owns a stream, which then lives as long as the process. For others it uses the address as the number (c10's "Note
    [StreamId assignment]"); the default stream has number and address 0."""
    native = isinstance(stream, torch._C._CudaStreamBase)
    return not native or stream.cuda_stream == 0 or stream.stream_id != stream.cuda_stream


class Pool:
    """The memory of some graphs of the device that is current when it is made. ``begin`` and ``end`` bracket a replay with the copies
    into and out of it."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.lock = threading.RLock()
        self.device = torch.cuda.current_device()
        self._stream: Any = None
        self.current = _current()
        self.number: Any = None  # of the last stream, where its order is enough
        self._last: Any = None
        self._event: Any = None  # behind the last replay, where its stream may not last

    def capture_stream(self) -> Any:
        """One for all captures: libraries keep a workspace per stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def begin(self) -> Any:
        """Takes the pool, makes the current stream wait for whatever was replayed from it on others, and returns what that stream is
        told by: CUDA's own number, where torch has it. Raises StreamCaptured, with the pool not taken."""
        self.lock.acquire()
        try:
            number = self.current(self.device)
            if self.number is None or number != self.number:
                self._change()
            return number
        except BaseException:
            self.lock.release()
            raise

    def end(self) -> None:
        try:
            if self.number is None:
                self._event = self._last.record_event()
        finally:
            self.lock.release()

    def drain(self) -> None:
        """Waits until nothing replayed from it runs any more: its memory, and what its graphs read, may be given back then. Raises
        StreamCaptured."""
        with self.lock:
            self.settle()
            self.number = self._last = self._event = None

    def settle(self) -> None:
        """Waits for all replays so far; also between ``begin`` and ``end``. Raises StreamCaptured."""
        event = self._behind()
        if event is not None:
            event.synchronize()

    def _change(self) -> None:
        stream, event = torch.cuda.current_stream(self.device), self._behind()
        if event is not None:
            stream.wait_event(event)
        self._last, self._event = stream, None
        self.number = self.current(self.device) if _lasts(stream) else None

    def _behind(self) -> Any:
        """An event behind all replays so far; None where there were none."""
        if self._event is not None or self._last is None:
            return self._event
        with torch.cuda.stream(self._last):
            if torch.cuda.is_current_stream_capturing():
                raise StreamCaptured("the stream of the last replays is being captured by somebody else")
        return self._last.record_event()
