"""The protocol as data: one table of steps that every arm walks, eager included. The n-th call of an arm answers to eager's n-th."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Step:
    """``action``: call (through the arm), eager (past it, on the same module), or something done to memory: poison, churn, scale,
    scribble. ``variant``: '' the row's own shape, 'size', 'batch': another legal one; a step whose variant does not exist is left out.
    ``profiled``: its kernels are counted."""

    check: str
    action: str
    probe: str = ""
    variant: str = ""
    profiled: bool = False

    @property
    def is_call(self) -> bool:
        return self.action in ("call", "eager")


SEQUENCE: Final = tuple(Step("replay", "call", probe, profiled=index == 3) for index, probe in enumerate(("A", "B", "A", "A", "B")))
"""A, B, A, A, B: the first call captures; the return to A finds what feeds outputs back; A twice finds what counts calls."""

INFERENCE: Final = (
    *SEQUENCE,
    Step("poison", "poison"),
    Step("poison", "call", "B"),  # as the last call: a path that skips work for an input it has just seen hands the poison out
    Step("churn", "churn"),
    Step("churn", "call", "A"),
    Step("interleave", "call", "B", "size"),
    Step("interleave", "eager", "A", "size"),
    Step("interleave", "call", "A", "batch"),
    Step("interleave", "churn"),
    Step("interleave", "call", "A"),
    Step("interleave", "call", "B"),  # a runtime that noticed runs the first call eagerly; this one replays again
    Step("weights", "scale"),
    Step("weights", "call", "A"),
    Step("escape", "scribble"),
    Step("escape", "eager", "B"),
)
