"""Writes that either happen or leave the old file as it was, and the error that says so; what Ctrl-C may not part."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class RecordError(Exception):
    """Something in reports/ that cannot be read or written.

    The message names file and line, what is wrong, and what to do.
    """


def write_error(path: Path, error: OSError) -> RecordError:
    """The sentence for a write that failed, by its reason."""
    if error.errno in FULL:
        return RecordError(f"{path}: the disk is full; the file is as it was before, make room and run the same command again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RecordError(f"{path}: may not be written ({error.strerror}); the file is as it was, change its rights or --reports")
    return RecordError(f"{path}: could not be written ({error.strerror or error}); the file is as it was")


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader sees the old text or the new one.

    Raises RecordError; the old file then stays.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's own rights would hide a report from everybody else
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise write_error(path, error) from error
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a new name in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C within is raised at the end, so that whatever is written is counted too.

    Changes nothing off the main thread, which alone is interrupted, nor where SIGINT is ignored or ends the process at once.
    """
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pressed:
            usual(*pressed[0])
