"""Changed paths, a line each on stdin, to the options that select what they can have changed.

Prints ``select=`` and the options: the zoos whose declarations changed; nothing, which selects all rows, where the judge or the
runtime did; ``none`` where no row can have changed. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

EVERYTHING = ("parity/rows/", "parity/run/", "parity/judge/", "parity/runtime/", "families/controls/", "pyproject.toml")
EVERYTHING_FILES = ("conftest.py", "families/__init__.py", ".github/workflows/gpu.yml")


def select(paths: Iterable[str], exists: Callable[[str], bool] = lambda path: Path(path).exists()) -> str:
    """The options, ``none``, or an empty string for everything (also where a zoo is gone: its certificates must be seen)."""
    zoos = set()
    for path in paths:
        if path.startswith(EVERYTHING) or path in EVERYTHING_FILES:
            return ""
        parts = PurePosixPath(path).parts
        if len(parts) > 1 and parts[0] == "families":
            zoo = parts[1].removesuffix(".py")
            if not re.fullmatch(r"[\w-]+", zoo) or not exists(f"families/{parts[1]}"):
                return ""
            zoos.add(zoo)
    return " ".join(f"--zoo {zoo}" for zoo in sorted(zoos)) or "none"


if __name__ == "__main__":
    print(f"select={select(line.strip() for line in sys.stdin)}")
