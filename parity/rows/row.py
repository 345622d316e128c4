"""A row: one claim to judge, as plain frozen data. Its id is the same string in pytest, evidence, reports and messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

MODES: Final = ("inference", "training")
ARMS: Final = ("eager", "bare", "graphed", "native")
DEFAULT_ARMS: Final = ("bare", "graphed", "native")

_SETTINGS = re.compile(r"(?:(?P<size>\d+)px-)?b(?P<batch>\d+)-(?P<dtype>[a-z0-9_]+)(?:-(?P<boundary>[a-z]+))?")


def _matched(text: str) -> re.Match[str]:
    match = _SETTINGS.fullmatch(text)
    if match is None:
        raise ValueError(f"not the settings of a row: {text!r} (such as '256px-b1-float32')")
    return match


@dataclass(frozen=True, order=True)
class Settings:
    """What a row holds fixed besides its family and task.

    ``size``: edge of the square input in pixels, or 0 where the family has no such thing. ``batch``: leading dimension.
    ``dtype``: torch's name of the floating-point type. ``boundary``: empty for the family's own choice of what is captured, else
    the name of another one (``whole``: the forward uncut, where the family is normally cut at a seam). Raises ValueError for values
    whose text could not be read back.
    """

    size: int = 0
    batch: int = 1
    dtype: str = "float32"
    boundary: str = ""

    def __post_init__(self) -> None:
        if _matched(str(self))["dtype"] != self.dtype:
            raise ValueError(f"not the settings of a row: dtype={self.dtype!r} reads as a dtype and a boundary")

    def __str__(self) -> str:
        size = f"{self.size}px-" if self.size else ""
        return f"{size}b{self.batch}-{self.dtype}" + (f"-{self.boundary}" if self.boundary else "")

    @classmethod
    def parse(cls, text: str) -> Settings:
        """The inverse of ``str``. Raises ValueError for anything else."""
        match = _matched(text)
        return cls(int(match["size"] or 0), int(match["batch"]), match["dtype"], match["boundary"] or "")


@dataclass(frozen=True, order=True)
class Row:
    """zoo x family x task x mode x settings x arm."""

    zoo: str
    family: str
    task: str
    mode: str = "inference"
    settings: Settings = Settings()
    arm: str = "graphed"

    def __post_init__(self) -> None:
        for name in ("zoo", "family", "task"):
            value = getattr(self, name)
            if not value or "/" in value or any(c.isspace() for c in value):
                raise ValueError(f"{name}={value!r} must be a word without slashes or blanks: it becomes part of a row's id")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is none of {', '.join(MODES)}")
        if self.arm not in ARMS:
            raise ValueError(f"arm={self.arm!r} is none of {', '.join(ARMS)}")

    @property
    def id(self) -> str:
        return f"{self.zoo}/{self.family}/{self.task}/{self.mode}/{self.settings}/{self.arm}"

    @property
    def subject(self) -> str:
        """The id without its arm: rows that share it share one eager reference."""
        return self.id.rpartition("/")[0]

    def __str__(self) -> str:
        return self.id

    @classmethod
    def parse(cls, text: str) -> Row:
        """The row of an id. Raises ValueError where the text is not one."""
        parts = text.split("/")
        if len(parts) != 6:
            raise ValueError(f"not a row id: {text!r} (zoo/family/task/mode/settings/arm)")
        zoo, family, task, mode, settings, arm = parts
        return cls(zoo, family, task, mode, Settings.parse(settings), arm)

    def with_arm(self, arm: str) -> Row:
        return replace(self, arm=arm)
