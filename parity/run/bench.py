"""How fast a row is: eager and an arm measured in turns, in a child that has the device to itself.

The child's side, asked for as a judge (``parity.run.bench:measure``); what it finds are the figures of one check called ``bench``.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from parity.judge.contest import Contest, NotCaptured, contest
from parity.judge.outcome import Check, Outcome
from parity.judge.subject import BrokenRow
from parity.rows.discovery import Catalogue
from parity.rows.row import Row
from parity.run.alone import REPEAT

BLOCK: Final = 0.05
"""Seconds that one sample lasts at least, where a thousand calls allow."""
WARM: Final = 5
"""Calls before anything is measured; a training step is captured after the first."""


def measure(row: Row, catalogue: Catalogue, engine: str, seed: int = 0) -> Outcome:
    """The figures of one row, or why it has none: ``broken``, or a failed check where the arm does not capture."""
    try:
        with contest(row, catalogue, engine, seed) as made:
            figures = figures_of(made, int(os.environ.get(REPEAT, "7")))
    except BrokenRow as error:
        return Outcome(row.id, "broken", message=f"{row.id}: {error}", seed=seed)
    except NotCaptured as refusal:
        check = Check("bench", "failed", detail=str(refusal), cause=refusal.cause, where=refusal.where)
        return Outcome(row.id, "judged", (check,), seed=seed)
    return Outcome(row.id, "judged", (Check("bench", "passed", figures=figures),), captures=1, replays=1, seed=seed)


def figures_of(made: Contest, repeat: int) -> dict[str, Any]:
    """Plain data. Times are [lower quartile, median, upper quartile] in microseconds: ``eager`` and ``time`` per call of many in a row,
    ``host_eager`` and ``host`` until one call returns, ``network`` as ``eager`` (None for inference). ``capture``: milliseconds of
    the call that captured. ``memory_eager``, ``memory``: bytes reserved at most while calls run, graphs and weights
    included; ``memory_capture``: while it captured."""
    memory_eager, _ = _footprint(made.eager)
    memory_capture, capture = _footprint(made.arm)
    made.check()
    memory, _ = _footprint(made.arm)
    eager, arm, *network = in_turns([made.eager, made.arm, *([made.network] if made.network is not None else [])], repeat)
    host_eager, host = host_times([made.eager, made.arm], repeat)
    made.check()
    return {
        "eager": quartiles(eager),
        "time": quartiles(arm),
        "host_eager": quartiles(host_eager),
        "host": quartiles(host),
        "network": quartiles(network[0]) if network else None,
        "capture": capture * 1e3,
        "memory_eager": memory_eager,
        "memory": memory,
        "memory_capture": memory_capture,
        "shapes": [list(shape) for shape in made.shapes],
        "dtype": made.dtype,
        "repeat": repeat,
    }


def quartiles(times: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile; three times the one there is."""
    return statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3


def in_turns(calls: list[Callable[[], Any]], repeat: int) -> list[list[float]]:
    """Per call ``repeat`` samples of microseconds, one of each in turn, so that what slows the machine down slows all of them."""
    counts = [_count(call) for call in calls]
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat):
        for call, count, times in zip(calls, counts, found, strict=True):
            times.append(_timed(call, count) * 1e6)
    return found


def _count(call: Callable[[], Any]) -> int:
    _timed(call, 2)
    return max(1, min(1000, round(BLOCK / max(_timed(call, 2), 1e-9))))


def _timed(call: Callable[[], Any], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def host_times(calls: list[Callable[[], Any]], repeat: int) -> list[list[float]]:
    """Per call microseconds until it returns, with nothing queued before it."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(3 * repeat):
        for call, times in zip(calls, found, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return found


def _footprint(call: Callable[[], Any]) -> tuple[int, float]:
    """Of the first calls: bytes reserved at most, and the seconds of the longest, which is the one that captures where one does. Graphs
    keep what was freed while they were captured, so that only reserved memory counts it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    longest = max(_timed(call, 1) for _ in range(WARM))
    return int(torch.cuda.max_memory_reserved()), longest
