"""What Linux offers to keep processes from outliving each other."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def die_with(parent: int) -> None:
    """Has this process killed when its parent dies. Leaves at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes descendants whose parent died children of this process, also those that left their process group."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(leader: int) -> None:
    """Kills a process and the group that it leads. One that is gone is no error."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def children_of(parent: int) -> list[int]:
    """The direct children of a process, zombies included."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                stat = file.read()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we were reading
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent:
            found.append(int(name))
    return found
