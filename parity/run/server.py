"""The process that children are forked from. It imports the zoos, forks on request, reports deaths, outlives nobody.

It is a process of its own, and no fork of the caller, because the caller may have started CUDA or threads. It is not
multiprocessing's forkserver: that one is shared by a whole process, hides errors of what it imports, runs the caller's
__main__ in every child, and does not outlive its children's children. Requests and reports are JSON over one socket
whose other end only the caller holds: when that closes, everything here is killed.

    caller -> server   {"start": number, "task": {...}} and a socket for the child · {"end": number}
    server -> caller   {"ready": ""} or {"failed": why} · {"started": number, "pid": pid}
                       · {"ended": number, "status": wait status}
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from parity.run import process, warm, worker
from parity.run.nursery import BOOT


def main(settings: Mapping[str, Any]) -> None:
    """``settings``: ``control`` (descriptor), ``folder``, ``path`` (sys.path), ``warm`` (empty, ``torch`` or
    ``whole``: zoos, too), and what ``warm.load`` takes."""
    control = Connection(settings["control"])
    os.set_inheritable(control.fileno(), False)
    process.adopt_orphans()
    try:
        asked = {name: settings[name] for name in ("sources", "zoos", "judge")}
        warmth = warm.load(**asked, whole=settings["warm"] == "whole") if settings["warm"] else None
        failure = warmth.unsafe if warmth else ""
    except warm.SetupError as error:
        warmth, failure = None, str(error)
    server = Server(control, warmth, settings)
    try:
        server.say({"failed": failure} if failure else {"ready": ""})
        if not failure:
            gc.collect()
            gc.freeze()  # what was imported stays shared between the forks, and collecting in a child stays cheap
            server.serve()
    except (EOFError, ConnectionError):  # the caller is gone
        server.end_all()
        shutil.rmtree(settings["folder"])
    finally:
        server.end_all()


class Server:
    """Owns the children. Single-threaded: it waits for requests and for SIGCHLD, nothing else."""

    def __init__(self, control: Connection, warmth: warm.Warmth | None, settings: Mapping[str, Any]) -> None:
        self._control = control
        self._warmth = warmth
        self._settings = settings
        self._numbers: dict[int, int] = {}
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)

    def say(self, message: Mapping[str, Any]) -> None:
        self._control.send_bytes(json.dumps(message).encode())

    def serve(self) -> None:
        """Until the caller closes its end, which raises EOFError."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno())
        while True:
            ready = wait([self._control, self._wake])
            if self._wake in ready:
                self._wake.recv(4096)
                self._reap()
            if self._control in ready:
                request = json.loads(self._control.recv_bytes())
                if "start" in request:
                    self._start(request["start"], request["task"])
                else:
                    self._end(request["end"])

    def end_all(self) -> None:
        """Kills everything that descends from this process, and waits for it."""
        while True:
            for pid in {*self._numbers, *process.children_of(os.getpid())}:
                process.kill_group(pid)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def _start(self, number: int, task: dict[str, Any]) -> None:
        with socket.fromfd(self._control.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as plain:
            _, descriptors, _, _ = socket.recv_fds(plain, 1, 1)
        if not descriptors:
            raise EOFError("the caller died while asking for a child")
        if danger := warm.fork_danger("something after the imports"):
            os.close(descriptors[0])
            self.say({"failed": danger})
            return
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_child(server, descriptors[0], task)
        os.close(descriptors[0])
        self._numbers[pid] = number
        self.say({"started": number, "pid": pid})

    def _become_child(self, server: int, descriptor: int, task: dict[str, Any]) -> NoReturn:
        code = 1
        try:
            os.setsid()
            process.die_with(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._control, self._wake, self._woken):
                end.close()
            if self._warmth is None:
                os.set_inheritable(descriptor, True)
                task = {**task, "path": self._settings["path"], "connection": descriptor}
                os.execv(sys.executable, [sys.executable, "-c", BOOT.format("parity.run.worker"), json.dumps(task)])
            worker.serve(Connection(descriptor), task, self._warmth)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _end(self, number: int) -> None:
        for pid, known in self._numbers.items():
            if known == number:
                process.kill_group(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._numbers.pop(pid, None)
            if number is None:  # an orphan that was adopted
                continue
            process.kill_group(pid)
            for orphan in process.children_of(os.getpid()):
                if orphan not in self._numbers:
                    process.kill_group(orphan)
            self.say({"ended": number, "status": status})
