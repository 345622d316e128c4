"""What ``import parity.runtime`` brings, read in a fresh interpreter: next to nothing, and with every name torch and itself."""

from __future__ import annotations

import subprocess
import sys

FOREIGN = (
    "pytest",
    "pandas",
    "hypothesis",
    "rich",
    "typer",
    "tabulate",
    "families",
    "parity.families",
    "libreyolo",
    "torchvision",
    "timm",
)
ROOMS = ("parity.rows", "parity.run", "parity.judge", "parity.record", "parity.cli", "parity.runtime.emulated")


def loaded(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_runtime_loads_itself_alone() -> None:
    found = loaded("import parity.runtime")
    assert found & {"torch", "numpy", *FOREIGN, *ROOMS} == set()
    assert {name for name in found if name.startswith("parity")} == {"parity", "parity.runtime"}


def test_every_name_of_it_loads_torch_and_what_torch_loads() -> None:
    every = "import parity.runtime as runtime\n[getattr(runtime, name) for name in runtime.__all__]"
    bare = loaded("import torch")
    found = loaded(f"import torch\n{every}")
    assert found & {*FOREIGN, *ROOMS} == set()
    heavy = {"torch._dynamo", "torch._inductor", "torch.testing", "torch.distributed.fsdp", "torch.onnx", "torch.ao.quantization.fx"}
    assert (found - bare) & heavy == set()
    assert "parity.runtime.training" in found


def test_a_foreign_import_would_be_seen() -> None:
    assert "pandas" in loaded("import parity.runtime, pandas") & set(FOREIGN)
