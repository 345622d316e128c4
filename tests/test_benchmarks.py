"""Every benchmark runs to its table without a GPU, where it says that its numbers mean nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNS = {
    "replay_cost.py --emulated --calls 3": "geometric mean",
    "eager_divergence.py --emulated --family fomo --steps 3": "of the weights",
    "training_step.py --emulated --family fomo": "| fomo",
    "finetune.py --emulated --family mobilenetv4 --epochs 1 --images 4 --without-upstream": "mobilenetv4, parity",
    "matrix_throughput.py --engine emulated --zoo libreyolo --family fomo --slots 1": "times as long",
}


def test_every_benchmark_is_run() -> None:
    assert {run.split()[0] for run in RUNS} == {path.name for path in (ROOT / "benchmarks").glob("*.py")}


@pytest.mark.parametrize("run", RUNS)
def test_a_benchmark_ends_with_its_table(run: str) -> None:
    pytest.importorskip("libreyolo")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    name, *options = run.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *options],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert RUNS[run] in done.stdout
