"""Imports what children need, once, in the process they are forked from; remembers what went wrong.

No CPU op and no CUDA happens here: a fork would inherit the thread pools and the driver state, and neither survives it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from parity.judge.outcome import Outcome
from parity.rows.discovery import Catalogue, DiscoveryError, discover
from parity.rows.family import Zoo

_SITE: Final = f"site-packages{os.sep}"
_SAFE_THREADS: Final = frozenset({"jemalloc_bg_thd"})  # pyarrow's allocator; it stops and restarts its thread around a fork
_HERE: Final = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD: Final = os.path.dirname(os.__file__) + os.sep


class SetupError(Exception):
    """Nothing can be judged at all: no families, no judge, or a process that must not be forked."""


@dataclass(frozen=True)
class Warmth:
    """What is imported. ``missing``: zoo to (status, message), where a zoo could not be. ``unsafe``: why nothing may be forked."""

    catalogue: Catalogue
    judge: Callable[..., Outcome] | None
    missing: Mapping[str, tuple[str, str]]
    unsafe: str = ""


def load(sources: Sequence[str], zoos: Sequence[str] = (), judge: str = "", whole: bool = True) -> Warmth:
    """Finds the families, imports torch, the judge (``module:function``) and the named zoos; not ``whole``: those only when a row needs
    them, for a few rows do not need all.

    Raises SetupError where there are no families or no judge. A zoo that cannot be imported is put into ``missing``.
    """
    try:
        catalogue = discover(sources)
        named = [catalogue.zoo(name) for name in zoos]
    except DiscoveryError as error:
        raise SetupError(str(error)) from error
    import torch  # noqa: F401  (children should not have to)

    function = resolve(judge) if judge else None
    missing: dict[str, tuple[str, str]] = {}
    unsafe = fork_danger("importing torch and the judge")
    for zoo in named:
        if problem := trouble(zoo, whole):
            missing[zoo.name] = problem
        unsafe = unsafe or fork_danger(f"the zoo {zoo.name}: its warm()")
    return Warmth(catalogue, function, missing, unsafe)


def resolve(name: str) -> Callable[..., Any]:
    """The function called ``module:function``. Raises SetupError."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"no judge {name!r} ('module:function'): {error}") from error
    if not callable(found):
        raise SetupError(f"judge {name!r} cannot be called: it is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def fork_danger(after: str) -> str:
    """Why this process must not be forked, naming what ran last; empty if it may be."""
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = [(task / "comm").read_text().strip() for task in others]
    extra = sorted(name for name in names if name not in _SAFE_THREADS)
    if extra:
        return f"{after} left threads running ({', '.join(extra)}), and such a process must not be forked: start none while importing"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"{after} started CUDA; its state does not survive a fork: touch no device while importing"
    if _driver_open():
        return f"{after} asked the CUDA driver; its state does not survive a fork: do not count devices while importing"
    return ""


def _driver_open() -> bool:
    """Whether the driver's memory device is open: it is from cuInit on, which merely counting devices calls."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("/dev/nvidia-uvm"):
                return True
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return False


def trouble(zoo: Zoo, whole: bool = True) -> tuple[str, str] | None:
    """Why a zoo cannot be used, as (status, message); None where it can. ``whole``: all that it may need is imported."""
    try:
        if not _importable(zoo.module):
            return "unavailable", f"{zoo.module} is not installed: {zoo.install}"
        if whole:
            zoo.warm()
    except ModuleNotFoundError as error:
        return "unavailable", f"zoo {zoo.name} needs {error.name}, which is not installed: {zoo.install}"
    except Exception as error:
        return "broken", f"zoo {zoo.name} cannot be imported: {type(error).__name__}: {error}{_at(error)}"
    return None


def _importable(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f" (at {line})" if line else ""


def user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame that is not torch's, the standard library's or ours; empty if there is none."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not _ours(file):
            found = f"{file.rpartition(_SITE)[2]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _ours(file: str) -> bool:
    if _SITE in file:
        return file.rpartition(_SITE)[2].startswith(f"torch{os.sep}") or file.startswith(_HERE)
    return file.startswith((_HERE, _STANDARD, "<"))
