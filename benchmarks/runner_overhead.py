"""What a steady call costs beyond the replay: ours, LibreYOLO's runner (where installed), and a bare ``graph.replay()``, in one run.

    python benchmarks/runner_overhead.py                    # CUDA: five LibreYOLO families, batch 1
    python benchmarks/runner_overhead.py --emulated         # no GPU: a small network; the numbers say nothing about a device

Microseconds, medians with their quartiles. ``device``: calls in a row, synchronized at the end. ``host``: until one call returns.
``check``: the full look at the module that an outermost scope pays once.
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
from torch import nn

from parity.runtime import GraphRunner
from parity.runtime.invalidation import Watch, scope

FAMILIES = (
    ("fomo", "LibreFOMO", "point", "s", 96),
    ("mobilenetv4", "LibreMobileNetV4", "classify", "s", 224),
    ("yolo9", "LibreYOLO9", "detect", "t", 640),
    ("picodet", "LibrePICODET", "detect", "s", 320),
    ("dfine", "LibreDFINE", "detect", "n", 640),
)
REPEATS = 7


def device_time(call: Callable[[], Any], calls: int) -> list[float]:
    for _ in range(10):
        call()
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return found


def host_time(call: Callable[[], Any], calls: int) -> list[float]:
    found = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return found


def told(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:8.1f} [{low:.1f}, {high:.1f}]"


def measure(name: str, forward: Callable[..., Any], module: nn.Module, x: torch.Tensor, calls: int) -> list[float]:
    """Prints one family; returns ours against upstream's in host time, where upstream is there."""
    ours = GraphRunner(forward, module)
    ratios: list[float] = []
    with torch.no_grad():
        eager = device_time(lambda: forward(x), max(calls // 10, 3))
        ours.capture(x)
        graph = ours.entries()[0].graph
        arms: dict[str, Callable[[], Any]] = {"bare": graph.replay, "ours": lambda: ours(x)}
        if (upstream := upstreams(forward)) is not None:
            upstream.capture(x)
            arms["upstream"] = lambda: upstream.run(x)
        with scope():
            device = {arm: device_time(call, calls) for arm, call in arms.items()}
            host = {arm: host_time(call, calls) for arm, call in arms.items()}
        watch = Watch(module)
        check = host_time(watch.look, calls)
    print(f"{name}: eager {told(eager)} us; full check {told(check)} us, {len(watch.tensors())} tensors")
    for what, times in (("device", device), ("host", host)):
        middle = {arm: statistics.median(t) for arm, t in times.items()}
        row = "  ".join(f"{arm} {told(t)}" for arm, t in times.items())
        against = "  ".join(f"ours/{arm} {middle['ours'] / middle[arm]:.3f}" for arm in middle if arm != "ours")
        print(f"  {what:6}  {row}   {against}", flush=True)
        if what == "host" and "upstream" in middle:
            ratios.append(middle["ours"] / middle["upstream"])
    return ratios


def upstreams(forward: Callable[..., Any]) -> Any:
    """LibreYOLO's runner around the same forward; None where LibreYOLO is not installed."""
    try:
        module = importlib.import_module("libreyolo.models.base.cuda_graph")
    except ModuleNotFoundError:
        return None
    return module.GraphRunner(forward)


def toy() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(40)]).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="on the emulated engine, with a small network")
    parser.add_argument("--calls", type=int, default=200)
    chosen = parser.parse_args()
    ratios: list[float] = []
    if chosen.emulated:
        from parity.runtime.emulated import device

        with device():
            model = toy().to("cuda")
            ratios += measure("40 blocks, emulated", model, model, torch.randn(1, 3, 8, 8).to("cuda"), chosen.calls)
    else:
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device: give --emulated for a run that only shows that this works")
        os.environ["HF_HUB_OFFLINE"] = "1"
        for package, kind, task, letter, size in FAMILIES:
            torch.manual_seed(0)
            built = getattr(importlib.import_module(f"libreyolo.models.{package}.model"), kind)(
                model_path=None, size=letter, device="cuda", task=task
            )
            built.model.eval()
            x = torch.randn(1, 3, size, size, device="cuda")
            ratios += measure(f"{package} {size}", built._forward, built.model, x, chosen.calls)
            torch.cuda.empty_cache()
    if ratios:
        print(f"host time against upstream, geometric mean: {statistics.geometric_mean(ratios):.3f}, worst {max(ratios):.3f}")


if __name__ == "__main__":
    main()
