"""A training step: eager, our TrainGraphs, LibreYOLO's TrainGraphManager, in one run and in turns, on the same batches.

    python benchmarks/training_step.py                      # CUDA: six LibreYOLO families, about a minute
    python benchmarks/training_step.py --family yolo9       # one of them
    python benchmarks/training_step.py --emulated --family fomo     # no GPU: small sizes; the numbers say nothing about a device

bfloat16 autocast, AdamW (fused), the trainer's own loss. Milliseconds per step, medians with quartiles; ratios against eager; bytes
reserved at most while each way ran alone, model and optimizer included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from parity.rows.row import Settings
from parity.rows.training import Training
from parity.runtime import TrainGraphs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from families.libreyolo.training import FAMILIES

CASES = (
    ("fomo", 96, 16),
    ("mobilenetv4", 224, 16),
    ("efficientnetv2", 224, 16),
    ("resnet", 224, 16),
    ("yolo9", 640, 8),
    ("picodet", 320, 8),
)
WARM = 8
REPEATS = 7
BLOCK = 0.25
"""Seconds per sample, about."""
Step = Callable[[], None]


def stepping(family: Training, settings: Settings, arm: str, real: bool) -> tuple[Step, Callable[[], str]]:
    """A step on a freshly built model, and why it does not replay, empty where it does."""
    torch.manual_seed(0)
    subject = family.build(settings).to(torch.device("cuda"))
    batch = [x.to("cuda") if isinstance(x, torch.Tensor) else x for x in family.draw(settings, "A", 0)]
    network: Any = subject.network
    cache = True
    graphs: TrainGraphs | None = None
    if arm == "ours":
        network = graphs = TrainGraphs(subject.network)
    elif arm == "upstream":
        assert subject.native is not None
        network = subject.native()
        cache = network.autocast_cache
    params = [p for p in subject.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-5, **({"fused": True} if real else {}))

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=cache):
            loss = subject.loss(network, *batch)
        optimizer.zero_grad(set_to_none=True)  # where LibreYOLO's trainer has it
        loss.backward()
        optimizer.step()

    def why() -> str:
        if graphs is not None:
            return graphs.reason or ("" if graphs.replays else "it never replayed")
        return "" if arm == "eager" or network.ready() else network.reason() or "it never captured"

    return step, why


def timed(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def alone(family: Training, settings: Settings, arm: str, real: bool) -> tuple[Step, float]:
    """A warmed-up step, and MiB reserved at most beyond what other ways hold."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    step, why = stepping(family, settings, arm, real)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    if reason := why():
        print(f"  {family.name}, {arm}: runs eagerly: {reason}")
    return step, (torch.cuda.max_memory_reserved() - before) / 2**20


def measure(family: Training, settings: Settings, real: bool) -> list[Any]:
    made = {arm: alone(family, settings, arm, real) for arm in ("eager", "upstream", "ours")}
    counts = {arm: max(1, round(BLOCK * 1e3 / max(timed(step, 2), 1e-3))) if real else 1 for arm, (step, _) in made.items()}
    times: dict[str, list[float]] = {arm: [] for arm in made}
    for _ in range(REPEATS):
        for arm, (step, _) in made.items():
            times[arm].append(timed(step, counts[arm]))
    middle = {arm: statistics.median(t) for arm, t in times.items()}
    memory = {arm: m for arm, (_, m) in made.items()}
    return [
        f"{family.name} b{settings.batch} {settings.size}",
        *(told(times[arm]) for arm in times),
        f"{middle['eager'] / middle['upstream']:.2f}x",
        f"{middle['eager'] / middle['ours']:.2f}x",
        f"{middle['ours'] / middle['upstream']:.3f}",
        f"{memory['eager']:.0f}",
        *(f"{memory[arm] / memory['eager'] - 1:+.0%}" if memory["eager"] else "" for arm in ("upstream", "ours")),
    ]


def told(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


HEADS = [
    "step", "eager ms", "upstream ms", "ours ms", "upstream", "ours", "ours/upstream", "MiB, eager", "upstream's", "ours'",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", action="store_true", help="on the emulated engine, small")
    parser.add_argument("--family", action="append", choices=[name for name, _, _ in CASES], default=[])
    chosen = parser.parse_args()
    real = not chosen.emulated
    if real and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: give --emulated for a run that only shows that this works")
    if real:
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
        scope: Any = nullcontext()
    else:
        from parity.runtime.emulated import device

        print("emulated: these numbers say nothing about a device")
        scope = device()
    known = {family.name: family for family in FAMILIES}
    rows = []
    with scope:
        for name, size, batch in CASES:
            if not chosen.family or name in chosen.family:
                family = known[name]
                settings = Settings(size, batch, "bfloat16") if real else Settings(family.size, family.batch, "bfloat16")
                rows.append(measure(family, settings, real))
                print("  ".join(map(str, rows[-1])), flush=True)  # a run that is cut short has still said something
    print(tabulate(rows, headers=HEADS, tablefmt="github"))


if __name__ == "__main__":
    main()
