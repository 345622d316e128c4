"""Judges that do to a child what models do, without a model. Each is named in Options.judge as ``fake_judges:name``."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from parity.judge.outcome import Check, Outcome
from parity.rows.discovery import Catalogue
from parity.rows.row import Row

HERE = Path(os.environ.get("FAKE_JUDGES_FOLDER", "/nonexistent"))
_seen: list[str] = []
_eager: dict[str, int] = {}


def _passed(row: Row) -> Outcome:
    return Outcome(row.id, "judged", (Check("replay", "passed"),))


def by_family(row: Row, catalogue: Catalogue, engine: str, seed: int, report: Callable[[Outcome], None]) -> Outcome:
    """Does what the row's family is called; says in which process, as the how many-th row, and where its subject began."""
    _seen.append(row.id)
    _eager.setdefault(row.subject, len(_seen))
    with (HERE / "judged").open("a") as file:
        file.write(f"{row.id} {os.getpid()} {len(_seen)}\n")
    figures = {"pid": os.getpid(), "nth": len(_seen), "eager": _eager[row.subject], "visible": os.environ["CUDA_VISIBLE_DEVICES"]}
    failed = row.family == "always" or (row.family == "first_only" and len(_seen) > 1)
    if act := globals().get(f"_{row.family}"):
        act(row, report)
    return Outcome(row.id, "judged", (Check("replay", "failed" if failed else "passed", figures=figures),))


def _exits(row: Row, report: Callable[[Outcome], None]) -> None:
    print("about to leave", flush=True)
    os._exit(7)


def _segfaults(row: Row, report: Callable[[Outcome], None]) -> None:
    ctypes.string_at(0)


def _raises(row: Row, report: Callable[[Outcome], None]) -> None:
    raise ValueError("this builder is wrong")


def _leaves(row: Row, report: Callable[[Outcome], None]) -> None:
    sys.exit("a model that calls sys.exit")


def _hangs(row: Row, report: Callable[[Outcome], None]) -> None:
    time.sleep(600)


def _family_hangs(row: Row, report: Callable[[Outcome], None]) -> None:
    """Ignores SIGTERM, and has a grandchild in its group and another that left it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for session in (False, True):
        grandchild = subprocess.Popen(["sleep", "600"], start_new_session=session)
        (HERE / f"grandchild-{session}").write_text(str(grandchild.pid))
    time.sleep(600)


def _waits(row: Row, report: Callable[[Outcome], None]) -> None:
    """Until the test removes the file that holds its process id."""
    file = HERE / f"waits-{row.settings.batch}"
    if (HERE / "no-more-waiting").exists():
        return
    file.write_text(str(os.getpid()))
    time.sleep(600)


def _hungry(row: Row, report: Callable[[Outcome], None]) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _hungry_once(row: Row, report: Callable[[Outcome], None]) -> None:
    mark = HERE / f"hungry-{row.settings.batch}"
    if not mark.exists():
        mark.touch()
        raise MemoryError("host")
    (HERE / "others").write_text(str(_siblings()))


def _siblings() -> int:
    """How many other processes have our parent: children of the same server."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        count += int(fields[1]) == os.getppid() and stat.parent.name != str(os.getpid())
    return count


def _downloads(row: Row, report: Callable[[Outcome], None]) -> None:
    socket.create_connection(("weights.example.org", 443))


def _downloads_quietly(row: Row, report: Callable[[Outcome], None]) -> None:
    with contextlib.suppress(RuntimeError):
        socket.socket().connect(("192.0.2.1", 443))


def _prints(row: Row, report: Callable[[Outcome], None]) -> None:
    for n in range(20000):
        print(f"line {n} " + "x" * 80)
    print("the end", file=sys.stderr)
    os._exit(3)


def _confesses(row: Row, report: Callable[[Outcome], None]) -> None:
    report(Outcome(row.id, "judged", (Check("churn", "failed", cause="stale-address"),), message="a dead read"))
    os.kill(os.getpid(), signal.SIGSEGV)


def _confesses_and_hangs(row: Row, report: Callable[[Outcome], None]) -> None:
    report(Outcome(row.id, "judged", (Check("churn", "failed", cause="stale-address"),)))
    time.sleep(600)


def _boasts(row: Row, report: Callable[[Outcome], None]) -> None:
    report(_passed(row))
    os._exit(1)


def tensor(row: Row, catalogue: Catalogue, engine: str, seed: int) -> Outcome:
    import torch

    return Outcome(row.id, "judged", (Check("replay", "passed", figures={"output": torch.zeros(2)}),))


def of_another(row: Row, catalogue: Catalogue, engine: str, seed: int) -> Outcome:
    return Outcome("not/the/row", "judged", (Check("replay", "passed"),))


def lacking(row: Row, catalogue: Catalogue, engine: str, seed: int) -> Outcome:
    """A builder that imports what is not there."""
    return Outcome(row.id, "judged", (), message=str(importlib.import_module("no_such_dependency")))
