"""The caller's side of the server that children are forked from: asks for children, hears of their deaths, ends it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

BOOT: Final = "import json, sys; s = json.loads(sys.argv[1]); sys.path[:] = s['path']; from {} import main; main(s)"
"""What a new interpreter is told to run, of a module to be named; with this process's path, for it may have been changed."""
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a zoo that asks for devices while it is imported does not start the driver
}
LAST_LINES: Final = 12
LINE_LENGTH: Final = 240  # characters
_ROOM: Final = os.path.dirname(__file__) + os.sep
_FAULTS: Final = ("Fatal Python error", "Timeout (")


class RunError(Exception):
    """The run itself is not to be trusted, or cannot go on. The message says why."""


class NoDevice(RunError):
    """The engine ``cuda`` was demanded, and there is no device."""


@dataclass
class Child:
    """A child process as its parent knows it: a socket, a log, and how it ended (wait status, None while it lives)."""

    number: int
    connection: Connection
    log: Path
    pid: int = 0
    offset: int = 0
    status: int | None = None
    inbox: list[dict[str, Any]] = field(default_factory=list)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Whether the child could still be reached. What it prints from now on belongs to this message."""
        self.offset = self.log.stat().st_size if self.log.exists() else 0
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> bool:
        """Moves what has arrived to the inbox; False once nothing more can come."""
        try:
            while self.connection.poll(0):
                self.inbox.append(json.loads(self.connection.recv_bytes()))
        except (EOFError, ConnectionResetError):
            return False
        return True

    def last_words(self) -> str:
        """The last lines printed since the last message; where the interpreter dumped a stack, the top of that."""
        return last_lines(self.log, self.offset)


def last_lines(log: Path, offset: int = 0) -> str:
    """The end of a log, from ``offset`` bytes on, or the stack dump in it, down to where this package called the judge."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - 64 * 1024))
        lines = file.read().decode(errors="replace").splitlines()
    lines = [line[:LINE_LENGTH] for line in lines if line.strip() and _ROOM not in line and '"<string>"' not in line]
    for index, line in enumerate(lines):
        if line.startswith(_FAULTS):
            return "\n".join(lines[index : index + LAST_LINES])
    return "\n".join(lines[-LAST_LINES:])


def how_it_ended(status: int) -> str:
    """A wait status in words. SIGKILL and the like are nothing that a program does to itself."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the child left by itself, with exit code {code}"
    name = signal.Signals(-code).name
    if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return f"the child was ended from outside, by {name}: by a person, or by a kernel short of host memory"
    return f"the child died of {name}"


class Nursery:
    """One server process, and a folder for the logs. ``settings``: sources, zoos, judge, warm."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._folder = Path(tempfile.mkdtemp(prefix="parity-"))
        self._log = self._folder / "server.log"
        self._count = 0
        self.children: dict[int, Child] = {}
        whole = {**settings, "folder": str(self._folder), "path": [p or os.getcwd() for p in sys.path], "control": theirs.fileno()}
        environment = {**os.environ, **ENVIRONMENT}
        environment.setdefault("PYTHONHASHSEED", "0")  # a model that walks a set of strings is built alike every time
        with theirs, self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT.format("parity.run.server"), json.dumps(whole)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal reaches the caller alone
            )
        self.control = Connection(os.dup(ours.fileno()))

    def start(self, task: Mapping[str, Any]) -> Child:
        """A new child, told its ``task`` (see ``worker.serve``). It says for itself when it is ready."""
        ours, theirs = socket.socketpair()
        self._count += 1
        log = self._folder / f"child-{self._count}.log"
        child = Child(self._count, Connection(ours.detach()), log)
        with theirs:
            self._say({"start": child.number, "task": {**task, "log": str(log)}})
            socket.send_fds(self._socket, [b"."], [theirs.fileno()])
        self.children[child.number] = child
        return child

    def end(self, child: Child) -> None:
        """Asks that a child's process group be killed. Its end is reported like any other."""
        if child.status is None:
            self._say({"end": child.number})

    def news(self) -> list[Child]:
        """Who ended since the last call; waits for nothing. Raises RunError where the server failed or died."""
        ended = []
        try:
            while self.control.poll(0):
                message = json.loads(self.control.recv_bytes())
                if "failed" in message:
                    raise RunError(message["failed"])
                if "started" in message:
                    self.children[message["started"]].pid = message["pid"]
                elif "ended" in message:
                    child = self.children[message["ended"]]
                    child.status = message["status"]
                    ended.append(child)
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        return ended

    def ask(self, child: Child, question: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """A child's answer to its first question. Raises RunError where none comes within ``limit`` s."""
        child.send(question)
        end = time.monotonic() + limit
        while True:
            wait([child.connection, self.control], max(0.0, end - time.monotonic()))
            ended = self.news()
            child.receive()
            for message in child.inbox:
                if "failed" in message:
                    raise RunError(message["failed"])
                if "ready" not in message:
                    return message
            if child in ended and child.status is not None:
                raise RunError(f"no answer from a child: {how_it_ended(child.status)}\n{child.last_words()}")
            if time.monotonic() > end:
                raise RunError(f"no answer from a child within {limit:g} s\n{child.last_words()}")

    def forget(self, child: Child) -> None:
        """After its end was reported."""
        child.connection.close()
        child.log.unlink(missing_ok=True)
        del self.children[child.number]

    def close(self) -> None:
        """Ends the server and everything that descends from it, and waits until they are gone."""
        self.control.close()
        self._socket.close()
        for child in self.children.values():
            child.connection.close()
        self.children.clear()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def _say(self, message: Mapping[str, Any]) -> None:
        try:
            self.control.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self.news()  # it may have said why
            raise self._died() from None

    def _died(self) -> RunError:
        code = self.process.wait()
        words = last_lines(self._log)
        return RunError(f"the process that children are forked from died (exit code {code})\n{words}".rstrip())
