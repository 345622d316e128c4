"""Kernel census: which kernels ran. One that executes while a capture lasts is not in the graph, and its name is the culprit's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

_FILLS = ("Memset", "Memcpy")
_CAPTURE_OWN = ("FillFunctor", "fill_kernel")
"""Capture prepares its random streams and pools with fills of its own; a model's fill on a wrong stream hides behind them."""


class Kernels:
    """Names of the kernels between ``start`` and ``stop``, in order of execution. CUDA only; copies and memsets aside. Profilers do
    not nest: one started inside another sees nothing."""

    running = False

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        if Kernels.running:
            return
        Kernels.running = True
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> list[str]:
        if self._profile is None:
            return []
        Kernels.running = False
        profile, self._profile = self._profile, None
        torch.cuda.synchronize()
        profile.stop()
        events = [e for e in profile.events() or () if e.device_type.name == "CUDA"]
        events = [e for e in events if not e.name.startswith(_FILLS)]
        return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


def short(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters; its last two scopes."""
    depth, kept = 0, []
    for character in name.replace("(anonymous namespace)::", ""):
        if character == "(" and depth == 0:
            break
        depth += (character == "<") - (character == ">")
        if depth == 0 and character != ">":
            kept.append(character)
    words = "".join(kept).split()
    return "::".join(words[-1].split("::")[-2:]) if words else name[:80]


def culprits(executed: list[str]) -> list[str]:
    """Kernels that executed while a capture lasted, the capture's own fills aside."""
    return sorted({short(name) for name in executed if not any(own in name for own in _CAPTURE_OWN)})


def tally(names: list[str]) -> dict[str, int]:
    """Kernel name to number of launches, sorted by name."""
    return dict(sorted(Counter(map(short, names)).items()))


def apart(eager: Mapping[str, int], replay: Mapping[str, int]) -> dict[str, Any]:
    """How two tallies differ: name to (eager, replay). Empty where they are alike."""
    names = sorted(eager.keys() | replay.keys())
    return {n: [eager.get(n, 0), replay.get(n, 0)] for n in names if eager.get(n, 0) != replay.get(n, 0)}
