"""How far two eager training runs from one seed drift apart, and that they do not under a proof's conditions; graphed beside them.

    python benchmarks/eager_divergence.py                       # CUDA: yolo9-t, float32, 20 steps of SGD with momentum
    python benchmarks/eager_divergence.py --emulated --steps 4  # no GPU: says nothing about a device, whose kernels are the point

Two figures per pair of runs, over all weights after the last step: |a - b| / |a|, and |a - b| / |a - start|, which measures against
what training did. 0 means equal in every bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from tabulate import tabulate
from torch import Tensor

from parity.judge.counterfactual import conditions
from parity.judge.train.step import TrainBench, mixed
from parity.rows.discovery import discover
from parity.rows.row import Row, Settings
from parity.runtime import TrainGraphs
from parity.runtime.engine import engine as engine_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def trained(bench: TrainBench, steps: int, graphed: bool) -> tuple[Tensor, Tensor, int]:
    """All weights before and after ``steps`` steps, and how many of them were replayed."""
    subject = bench.build()
    network: Any = TrainGraphs(subject.network) if graphed else subject.network
    weights = [p for p in subject.module.parameters() if p.requires_grad]
    start = torch.cat([p.detach().reshape(-1).clone() for p in weights])
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.937, nesterov=True)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with mixed(bench.dtype, True):
            loss = subject.loss(network, *bench.args("AB"[step % 2]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 10.0)
        optimizer.step()
    end = torch.cat([p.detach().reshape(-1).clone() for p in weights])
    return start, end, network.replays if graphed else 0


def gap(one: Sequence[Any], other: Sequence[Any]) -> list[str]:
    (start, a, _), (_, b, _) = one, other
    if torch.equal(a.view(torch.int32), b.view(torch.int32)):
        return ["0", "0"]
    apart = (a.double() - b.double()).norm()
    return [f"{float(apart / a.double().norm()):.2%}", f"{float(apart / (a.double() - start.double()).norm()):.2%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="yolo9")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--under", action="append", default=[], choices=[c.name for c in conditions.CONDITIONS if c.kind == "both"])
    parser.add_argument("--emulated", action="store_true")
    chosen = parser.parse_args()
    under = chosen.under or ["cudnn-deterministic", "deterministic-algorithms"]
    catalogue = discover([Path(__file__).resolve().parent.parent / "families"])
    family = next(f for f in catalogue.zoo("libreyolo").families if (f.name, f.mode) == (chosen.family, "training"))
    row = Row("libreyolo", family.name, family.task, "training", Settings(family.sizes[0], family.batch, "float32"))
    driver = engine_of("emulated" if chosen.emulated else "cuda")
    bench = TrainBench(row, catalogue.training(row), driver, 0)

    def run(graphed: bool = False) -> tuple[Tensor, Tensor, int]:
        return trained(bench, chosen.steps, graphed)

    lines = []
    with driver.entered(), ExitStack() as stack:
        run()  # the first steps of a process may pick other kernels
        lines.append(["eager, eager again", "none", *gap(run(), run())])
        stack.enter_context(conditions.applied(under))
        run()
        first, again, graphed = run(), run(), run(graphed=True)
        lines.append(["eager, eager again", ", ".join(under), *gap(first, again)])
        lines.append([f"eager, graphed ({graphed[2]} of {chosen.steps} replayed)", ", ".join(under), *gap(first, graphed)])
    where = "emulated: says nothing about a device" if chosen.emulated else torch.cuda.get_device_name()
    print(f"{row.family}, {row.settings}, {chosen.steps} steps; {where}, torch {torch.__version__}")
    print(tabulate(lines, headers=["runs", "conditions", "of the weights", "of the training"], tablefmt="github"))


if __name__ == "__main__":
    main()
