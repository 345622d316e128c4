"""Graphs that share memory never overlap: one after the other on the host, and on the device whatever streams they are replayed on."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

CAPTURES: Final = threading.RLock()
"""One capture at a time in this process: they share the default generator."""


class Pool:
    """The memory of some graphs of one device. ``begin`` and ``end`` bracket a replay with the copies into and out of it."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.lock = threading.RLock()
        self._stream: Any = None
        self._event: Any = None
        self._last: Any = None
        self._now: Any = None

    def capture_stream(self) -> Any:
        """One for all captures: libraries keep a workspace per stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def begin(self) -> None:
        """Takes the pool, and makes the current stream wait for whatever was replayed from it last."""
        self.lock.acquire()
        try:
            stream = torch.cuda.current_stream()
            if self._event is None:
                self._event = torch.cuda.Event()
            elif stream != self._last:
                stream.wait_event(self._event)
            self._now = stream
        except BaseException:
            self.lock.release()
            raise

    def end(self) -> None:
        try:
            self._event.record(self._now)
            self._last = self._now
        finally:
            self.lock.release()

    def drain(self) -> None:
        """Waits until nothing replayed from it runs any more: its memory, and what its graphs read, may be given back then."""
        with self.lock:
            if self._last is not None:
                self._event.synchronize()
                self._last = None
                self._event = None
