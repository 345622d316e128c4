"""Several runs of an arm beside several of eager's: every tensor of every step that is not the same in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parity.judge.bits import Difference, differences
from parity.judge.train.quorum import Varying, varying
from parity.judge.train.sort import KINDS, kind_of
from parity.judge.train.step import Left

Run = list[Left]
Found = tuple[int, str, Varying]
"""Step, part, and a tensor of it that is not the same in all runs."""


@dataclass
class Comparison:
    """Several runs of an arm beside several of eager. ``found``: all that is not exact; ``total``,
    ``gradients``: how many tensors there are (generators are none), and gradients of the first batch."""

    found: list[Found] = field(default_factory=list)
    total: int = 0
    gradients: int = 0

    @property
    def exact(self) -> bool:
        return not self.found

    @property
    def differing_gradients(self) -> int:
        """Of the first batch."""
        return sum(step == 0 and part == "gradients" for step, part, _ in self.found)

    @property
    def sorting(self) -> dict[str, int]:
        kinds = [kind_of(tensor) for _, part, tensor in self.found if part != "rng"]
        return {kind: kinds.count(kind) + (self.total - len(kinds)) * (kind == "exact") for kind in KINDS}

    @property
    def differences(self) -> list[tuple[str, Difference]]:
        """(part, difference) of what the arm does not have as eager's first run has it."""
        told = [(part, tensor.path, *tensor.look()) for _, part, tensor in self.found if tensor.look is not None]
        found = differences([pair for _, *pair in told])  # type: ignore[misc]
        return [(part, apart) for (part, *_), apart in zip(told, found, strict=True) if apart is not None]


def compared(eager: Sequence[Run], arm: Sequence[Run], *, measured: bool = False) -> Comparison:
    """Every tensor of every step; with no runs of an arm, eager beside itself. ``measured``: so that it can be sorted."""
    result = Comparison()
    for step, first in enumerate(eager[0]):
        for part, _ in first.parts():
            mine = [getattr(run[step], part) for run in eager]
            theirs = [getattr(run[step], part) for run in arm]
            there = [any(kind is not None for kind in kinds) for kinds in zip(*(b.kinds for b in (*mine, *theirs)), strict=False)]
            result.total += sum(there) * (part != "rng")
            result.gradients += sum(there) * (part == "gradients" and step == 0)
            result.found += [(step, part, tensor) for tensor in varying(mine, theirs, measured=measured)]
    return result
