"""Where in the user's own code we are: the innermost frame outside torch and this package."""

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


@functools.cache
def _foreign(filename: str) -> bool:
    return not filename.startswith((_TORCH, _PARITY, "<")) and os.sep + "contextlib.py" not in filename


@functools.lru_cache(maxsize=4096)
def describe(filename: str, line: int) -> str:
    """``file:line code``, with the file relative to site-packages, the current folder, or else where it was imported from."""
    installed = re.split(r"[\\/](?:site|dist)-packages[\\/]", filename)
    entries = [os.path.join(os.path.abspath(entry), "") for entry in sys.path]
    here = os.path.join(os.getcwd(), "")
    home = here if filename.startswith(here) else max((e for e in entries if filename.startswith(e)), key=len, default="")
    short = installed[-1] if len(installed) > 1 else filename[len(home) :]
    return f"{short}:{line} {linecache.getline(filename, line).strip()}".rstrip()


def user_line(frame: FrameType | None = None) -> str:
    """The innermost foreign frame above ``frame`` (default: the caller), or an empty string."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if _foreign(frame.f_code.co_filename):
            return describe(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def error_line(error: BaseException) -> str:
    """The innermost foreign frame an exception passed through, or an empty string."""
    found = ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        if _foreign(traceback.tb_frame.f_code.co_filename):
            found = describe(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found
