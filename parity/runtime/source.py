"""Where in the user's own code we are: the innermost frame outside torch, torchvision's operators, Python itself and this package."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
from types import FrameType, TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PARITY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/]")
_OPERATORS = os.path.join("", "torchvision", "ops", "")


@functools.cache
def _foreign(filename: str) -> bool:
    if filename.startswith((_TORCH, _PARITY, "<")):
        return False
    return not filename.startswith(_LIBRARY) or _INSTALLED.search(filename) is not None


@functools.lru_cache(maxsize=4096)
def describe(filename: str, line: int) -> str:
    """``file:line code``, with the file relative to site-packages, the current folder, or else where it was imported from."""
    installed = _INSTALLED.split(filename)
    entries = [os.path.join(os.path.abspath(entry), "") for entry in sys.path]
    here = os.path.join(os.getcwd(), "")
    home = here if filename.startswith(here) else max((e for e in entries if filename.startswith(e)), key=len, default="")
    short = installed[-1] if len(installed) > 1 else filename[len(home) :]
    return f"{short}:{line} {linecache.getline(filename, line).strip()}".rstrip()


def user_line(frame: FrameType | None = None) -> str:
    """The innermost foreign frame above ``frame`` (default: the caller), or an empty string. torchvision's operators are nobody's
    model: they count where nobody else called them."""
    frame = frame or sys._getframe(1)
    operator = ""
    while frame is not None:
        if _foreign(filename := frame.f_code.co_filename):
            line = describe(filename, frame.f_lineno)
            if _OPERATORS not in filename:
                return line
            operator = operator or line
        frame = frame.f_back
    return operator


def error_line(error: BaseException) -> str:
    """The innermost foreign frame an exception passed through, or an empty string."""
    found = operator = ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        if _foreign(filename := traceback.tb_frame.f_code.co_filename):
            line = describe(filename, traceback.tb_lineno)
            found, operator = (found, line) if _OPERATORS in filename else (line, operator)
        traceback = traceback.tb_next
    return found or operator
