"""What a steady call costs: ours, LibreYOLO's runner (where installed), a bare ``graph.replay()``, and eager, in one run, in turns.

    python benchmarks/replay_cost.py                 # CUDA: five LibreYOLO families, batch 1
    python benchmarks/replay_cost.py --emulated      # no GPU: a small network; the numbers say nothing about a device

Microseconds, medians with their quartiles. ``device``: calls in a row, synchronized at the end. ``host``: until one call returns, with
nothing queued before it. The last result of each is kept until the next comes, as callers do. ``bare`` has those copies in it that are
nodes of the graph. ``parts``: where the host time of ours goes. ``check``: the full look at the module, which an outermost scope pays
once. Ends with the ratios of all families and their geometric means.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from parity.runtime import GraphRunner
from parity.runtime.invalidation import Watch, scope
from parity.runtime.nodes import EXECUTABLES
from parity.runtime.signature import alike, modes, quick
from parity.runtime.steady import steady

FAMILIES = (
    ("fomo", "LibreFOMO", "point", "s", 96),
    ("mobilenetv4", "LibreMobileNetV4", "classify", "s", 224),
    ("yolo9", "LibreYOLO9", "detect", "t", 640),
    ("picodet", "LibrePICODET", "detect", "s", 320),
    ("dfine", "LibreDFINE", "detect", "n", 640),
)
REPEATS = 9
Calls = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]
HELD: dict[str, Any] = {}
"""The last result of each arm. A bare replay writes over that of ours, where copies are nodes of the graph."""


def device_times(arms: Calls, calls: int) -> Times:
    """Per arm one sample in each of REPEATS turns."""
    found: Times = {name: [] for name in arms}
    for turn in range(REPEATS + 1):
        for name, call in arms.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                HELD[name] = call()
            torch.cuda.synchronize()
            if turn:  # the first one warms up
                found[name].append((time.perf_counter() - start) / calls * 1e6)
    return found


def host_times(arms: Calls, calls: int) -> Times:
    found: Times = {name: [] for name in arms}
    for turn in range(calls + 10):
        for name, call in arms.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            HELD[name] = call()
            spent = time.perf_counter() - start
            if turn >= 10:
                found[name].append(spent * 1e6)
    torch.cuda.synchronize()
    return found


def told(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


def parts_of(runner: GraphRunner, x: torch.Tensor) -> Calls:
    (entry,) = runner.entries()

    def pool() -> None:
        entry.pool.begin()
        entry.pool.end()

    parts: Calls = {"modes": modes, "key": lambda: quick((x,), ()), "pool": pool, "capturing?": torch.cuda.is_current_stream_capturing}
    if (fits := alike(x)) is not None:
        parts["like the last"] = lambda: fits(x)
    if (shortcut := steady(entry, x)) is not None:
        parts["shortcut"] = lambda: shortcut(x)
    if (copies := entry.copies) is not None:
        parts["addresses"] = lambda: copies.tell((x,))
    if copies is None or not copies.takes:
        parts["copy in"] = lambda: entry.intake.fill((x,))
    parts["replay"] = entry.graph.replay
    if copies is not None and copies.numbered:
        stream = torch.cuda.current_stream().cuda_stream
        parts["launch"] = lambda: copies.launch(stream)
    if copies is None or not copies.gives:
        parts["copy out"] = lambda: entry.outlet.hand_out((x,))
    return parts


def measure(name: str, forward: Callable[..., Any], module: nn.Module, x: torch.Tensor, calls: int) -> dict[str, dict[str, float]]:
    """Prints one family; returns medians by kind of time and arm."""
    runner = GraphRunner(forward, module)
    with torch.no_grad():
        eager = device_times({"eager": lambda: forward(x)}, max(calls // 20, 2))["eager"]
        runner.capture(x)
        before = beside_torch()
        held = [runner(x) for _ in range(EXECUTABLES)]  # each in another place
        taken = beside_torch() - before
        del held
        HELD["ours"] = runner(x)
        arms: Calls = {"bare": runner.entries()[0].graph.replay, "ours": lambda: runner(x)}
        if (upstream := upstreams(forward)) is not None:
            upstream.capture(x)
            arms["upstream"] = lambda: upstream.run(x)
        with scope():
            times = {"device": device_times(arms, calls), "host": host_times(arms, calls)}
            parts = host_times(parts_of(runner, x), calls)
        HELD.clear()
        watch = Watch(module)
        check = host_times({"check": watch.look}, calls)["check"]
    print(f"{name}: eager {told(eager)} us; full check {told(check)} us, {len(watch.tensors())} tensors, {outputs(runner)} outputs")
    print(f"  {nodes(runner)}; beside torch's memory {taken / 2**20:.1f} MiB more than after the capture")
    for what, found in times.items():
        print(f"  {what:6}  " + "   ".join(f"{arm} {told(t)}" for arm, t in found.items()))
    print("  parts   " + "   ".join(f"{part} {statistics.median(t):.1f}" for part, t in parts.items()), flush=True)
    return {what: {arm: statistics.median(t) for arm, t in found.items()} for what, found in times.items()}


def beside_torch() -> int:
    """Bytes of the device in use that torch's allocator did not ask for: the driver's, graphs among them."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def outputs(runner: GraphRunner) -> int:
    return sum(isinstance(leaf, torch.Tensor) for leaf in runner.entries()[0].outputs)


def nodes(runner: GraphRunner) -> str:
    """Which copies are nodes of the graph."""
    copies = runner.entries()[0].copies
    sides = [] if copies is None else [side for side, are in (("in", copies.takes), ("out", copies.gives)) if are]
    if copies is None or not sides:
        return "copies beside the graph"
    return f"copies {' and '.join(sides)} are nodes of the graph, {len(copies._told)} executable graphs"


def upstreams(forward: Callable[..., Any]) -> Any:
    """LibreYOLO's runner around the same forward; None where LibreYOLO is not installed."""
    try:
        module = importlib.import_module("libreyolo.models.base.cuda_graph")
    except ModuleNotFoundError:
        return None
    return module.GraphRunner(forward)


def summary(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Ratios of ours, family by family, and their geometric means."""
    rows: list[list[Any]] = []
    for name, times in found.items():
        row: list[Any] = [name]
        for what in ("device", "host"):
            row += [times[what]["ours"] / times[what][arm] if arm in times[what] else None for arm in ("bare", "upstream")]
        rows.append(row)
    means: list[Any] = ["geometric mean"]
    for column in range(1, 5):
        ratios = [row[column] for row in rows if row[column] is not None]
        means.append(statistics.geometric_mean(ratios) if ratios else None)
    heads = ["ours against", "device: bare", "device: upstream", "host: bare", "host: upstream"]
    print(tabulate([*rows, means], headers=heads, tablefmt="github", floatfmt=".3f"))


def toy() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(40)]).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="on the emulated engine, with a small network")
    parser.add_argument("--calls", type=int, default=200)
    chosen = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    if chosen.emulated:
        from parity.runtime.emulated import device

        with device():
            model = toy().to("cuda")
            found["toy"] = measure("40 blocks, emulated", model, model, torch.randn(1, 3, 8, 8).to("cuda"), chosen.calls)
            print("emulated: these numbers say nothing about a device")
    else:
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device: give --emulated for a run that only shows that this works")
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
        os.environ["HF_HUB_OFFLINE"] = "1"
        for package, kind, task, letter, size in FAMILIES:
            torch.manual_seed(0)
            built = getattr(importlib.import_module(f"libreyolo.models.{package}.model"), kind)(
                model_path=None, size=letter, device="cuda", task=task
            )
            built.model.eval()
            x = torch.randn(1, 3, size, size, device="cuda")
            found[package] = measure(f"{package} {size}", built._forward, built.model, x, chosen.calls)
            torch.cuda.empty_cache()
    summary(found)


if __name__ == "__main__":
    main()
