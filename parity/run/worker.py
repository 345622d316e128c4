"""A child: it judges rows, one after the other, and says what it saw in plain data. It has no network.

parent -> child   {"row": id, "timeout": seconds} · {"probe": [zoo, ...]}
child -> parent   {"ready": seconds} or {"failed": why, "out_of_memory": bool} · {"probed": {...}}
                  · {"environment": {...}}, once per zoo · {"provisional": outcome}, any number
                  · {"outcome": outcome, "touched": whether the judge ran}
"""

from __future__ import annotations

import dataclasses
import faulthandler
import inspect
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from parity.judge.outcome import NETWORK_ERRORS, Outcome
from parity.rows.row import Row
from parity.run import environment, memory, warm


class NetworkNeeded(RuntimeError):
    """A row asked for the network. Not an OSError: the libraries that download retry those and swallow them."""


def main(settings: Mapping[str, Any]) -> None:
    """For a child that is a new interpreter and imports everything itself."""
    os.set_inheritable(settings["connection"], False)
    serve(Connection(settings["connection"]), settings, None)


def serve(connection: Connection, task: Mapping[str, Any], warmth: warm.Warmth | None) -> None:
    """Judges until the parent closes its end. ``task``: log, engine, device, judge, sources, zoos, seed, warm."""
    began = time.monotonic()
    _redirect(task["log"])
    if task["device"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = task["device"]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts; deterministic algorithms demand it
    asked = _block_network()
    try:
        if warmth is None:
            warmth = warm.load(task["sources"], task["zoos"], task["judge"])
        elif warmth.unsafe:
            raise warm.SetupError(warmth.unsafe)
        engine = _start(task["engine"])
    except Exception as error:
        traceback.print_exc()
        known = isinstance(error, warm.SetupError)
        why = str(error) if known else f"{type(error).__name__}: {error}"
        _send(connection, {"failed": why, "out_of_memory": _is_out_of_memory(error)})
        return
    _send(connection, {"ready": time.monotonic() - began})
    give_back = memory.hold() if engine == "emulated" else lambda: None
    child = Child(connection, warmth, engine, task["seed"], asked)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        if "probe" in request:
            _send(connection, {"probed": child.probe(request["probe"])})
        else:
            child.judge(Row.parse(request["row"]), request["timeout"])
            give_back()


class Child:
    """What stays between rows: the machine's facts, and whatever the judge keeps of a subject."""

    def __init__(self, connection: Connection, warmth: warm.Warmth, engine: str, seed: int, asked: list[str]) -> None:
        self._connection = connection
        self._warmth = warmth
        self._engine = engine
        self._seed = seed
        self._asked = asked
        self._environments: dict[str, dict[str, Any]] = {}

    def probe(self, zoos: list[str]) -> dict[str, Any]:
        """Engine, devices and facts; ``zoos`` empty: all that the families name."""
        named = [z for z in self._warmth.catalogue.zoos if not zoos or z.name in zoos]
        of_zoos = {z.name: environment.of_zoo(z) for z in named}
        devices = list(environment.devices()) if self._engine == "cuda" else []
        facts = environment.of_machine(self._engine) | {"gpus": len(devices), "zoos": of_zoos}
        return {"engine": self._engine, "devices": devices, "environment": facts}

    def judge(self, row: Row, timeout: float) -> None:
        """Judges one row and sends its outcome. ``timeout`` s from now the stack goes to the log, for the parent."""
        began = time.monotonic()
        self._asked.clear()
        faulthandler.dump_traceback_later(timeout, file=2)
        touched = False
        try:
            outcome = self._excuse(row)
            if outcome is None:
                facts = self._environment(row)
                touched = True
                outcome = self._judged(row)
                if not isinstance(outcome, Outcome) or outcome.row != row.id:
                    raise TypeError(f"the judge must return this row's outcome, not {str(outcome)[:200]}")
                if not outcome.environment:
                    outcome = dataclasses.replace(outcome, environment=facts)
        except BaseException as error:
            traceback.print_exc()
            outcome = dataclasses.replace(outcome_of(row, error), environment=self._environments.get(row.zoo, {}))
        finally:
            faulthandler.cancel_dump_traceback_later()
        lacks = outcome.status == "broken" and "ModuleNotFoundError" in outcome.message  # where the zoo was only looked for
        if lacks and (trouble := warm.trouble(self._warmth.catalogue.zoo(row.zoo))):
            outcome = dataclasses.replace(outcome, status=trouble[0], message=trouble[1])
        seconds = {**outcome.seconds, "total": time.monotonic() - began}
        notes = outcome.notes + tuple(f"asked for the network: {host}" for host in dict.fromkeys(self._asked))
        self._send_outcome(dataclasses.replace(outcome, seconds=seconds, notes=notes, seed=self._seed), touched)

    def _excuse(self, row: Row) -> Outcome | None:
        """The outcome of a row that cannot be judged here, known before the judge is asked."""
        if row.zoo in self._warmth.missing:
            status, message = self._warmth.missing[row.zoo]
            return Outcome(row.id, status, message=message)
        if reason := self._warmth.catalogue.declaration(row).unavailable:
            return Outcome(row.id, "unavailable", message=reason)
        return None

    def _environment(self, row: Row) -> dict[str, Any]:
        if row.zoo not in self._environments:
            facts = environment.of_machine(self._engine) | environment.of_zoo(self._warmth.catalogue.zoo(row.zoo))
            self._environments[row.zoo] = facts
            _send(self._connection, {"environment": facts})
        return self._environments[row.zoo]

    def _judged(self, row: Row) -> Outcome:
        judge = self._warmth.judge
        assert judge is not None, "a child that probes was asked to judge"
        more = {"report": self._report} if "report" in inspect.signature(judge).parameters else {}
        return judge(row, self._warmth.catalogue, self._engine, self._seed, **more)

    def _report(self, outcome: Outcome) -> None:
        _send(self._connection, {"provisional": outcome.to_dict()})

    def _send_outcome(self, outcome: Outcome, touched: bool) -> None:
        try:
            _send(self._connection, {"outcome": outcome.to_dict(), "touched": touched})
        except TypeError as error:
            message = f"the judge returned something that is not plain data: {error}"
            broken = Outcome(outcome.row, "broken", message=message, seconds=outcome.seconds, seed=self._seed)
            _send(self._connection, {"outcome": broken.to_dict(), "touched": touched})


def outcome_of(row: Row, error: BaseException) -> Outcome:
    """What an exception that nobody caught says about a row: out of memory, no network, or broken."""
    line = warm.user_line(error)
    message = f"{type(error).__name__}: {error}" + (f" (at {line})" if line else "")
    if _is_out_of_memory(error):
        return Outcome(row.id, "out_of_memory", message=message)
    for one in _chain(error):
        if type(one).__name__ in NETWORK_ERRORS:
            return Outcome(row.id, "unavailable", message=f"row needs the network: {one}{line and f' (at {line})'}")
    return Outcome(row.id, "broken", message=message)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or "out of memory" in str(error).lower()


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _redirect(log: str) -> None:
    """Both output streams go to the log, line by line, so that a crash leaves its last words there."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    faulthandler.enable(file=2)


def _start(engine: str) -> str:
    """Starts the engine in this process and returns its name; ``auto``: cuda where there is a device."""
    import torch

    if engine == "auto":
        engine = "cuda" if environment.has_device() else "emulated"
    if engine == "cuda":
        torch.cuda.init()
        torch.cuda.synchronize()  # the context, now, and not in the time of the first row
    else:
        torch.set_num_threads(1)
    return engine


def _block_network() -> list[str]:
    """From now on names are not resolved, and only local addresses connected to. Returns the growing list of hosts asked for."""
    asked: list[str] = []
    connect = socket.socket.connect

    def refuse(host: object) -> NoReturn:
        asked.append(str(host))
        raise NetworkNeeded(f"it asked for {host}, but a row must build from what is installed")

    def getaddrinfo(host: object, *_args: object, **_more: object) -> NoReturn:
        refuse(host)

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            refuse(address[0])
        connect(self, address)

    socket.socket.connect = guarded  # type: ignore[method-assign,assignment]
    socket.getaddrinfo = getaddrinfo
    return asked
