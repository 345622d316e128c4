"""What a parent does before it measures: nothing else of ours is measured on this machine meanwhile, and children know how often."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from parity.run.nursery import RunError

REPEAT: Final = "PARITY_BENCH_REPEAT"
"""The variable that tells children how many samples to take of each time."""


@contextlib.contextmanager
def alone(repeat: int) -> Iterator[None]:
    """Raises RunError where another bench runs, ValueError for too few samples. Other programs on the device it cannot keep away."""
    if repeat < 1:
        raise ValueError(f"repeat={repeat}: at least one sample of each time")
    before = os.environ.get(REPEAT)
    with (Path(tempfile.gettempdir()) / "parity-bench.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError("another `parity bench` runs on this machine: two at a time would measure each other") from None
        os.environ[REPEAT] = str(repeat)
        try:
            yield
        finally:
            if before is None:
                del os.environ[REPEAT]
            else:
                os.environ[REPEAT] = before
