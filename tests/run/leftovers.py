"""Which processes are still there."""

import os
import time
from pathlib import Path


def processes_with(mark: str) -> list[int]:
    """Processes whose environment holds ``mark``; zombies have none."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return [pid for pid in found if pid != os.getpid()]


def wait_until(condition, what: str, seconds: float = 20.0):
    """What ``condition`` returns, once that is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return value
