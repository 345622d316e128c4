"""What a child knows about its machine and the zoos installed there: words only, for evidence and certificates."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.rows.family import Zoo


def has_device() -> bool:
    """Whether torch can use a CUDA device here. Starts CUDA: never call it where children are forked from."""
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() > 0


def devices() -> tuple[str, ...]:
    """The entries of CUDA_VISIBLE_DEVICES that torch can use, one per device, in its order. Starts CUDA."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if visible is None else [entry.strip() for entry in visible.split(",")]
    return tuple(names[:count])


def of_machine(engine: str) -> dict[str, str]:
    """Facts about device 0 and the libraries, as torch words them; ``arch`` as ``sm90``. Starts CUDA on engine ``cuda``."""
    import torch

    facts = {
        "engine": engine,
        "gpu": "",
        "arch": "",
        "driver": "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
    }
    if engine == "cuda":
        major, minor = torch.cuda.get_device_capability(0)
        facts |= {"gpu": torch.cuda.get_device_name(0), "arch": f"sm{major}{minor}", "driver": _driver()}
    return facts


def of_zoo(zoo: Zoo) -> dict[str, Any]:
    """``zoo``: its version; ``zoo_facts``: what else it says about itself, where it says anything."""
    try:
        facts: dict[str, Any] = {"zoo": zoo.version()}
    except importlib.metadata.PackageNotFoundError:
        return {"zoo": ""}
    more: Mapping[str, str] = zoo.environment()
    return facts | ({"zoo_facts": dict(more)} if more else {})


def _cpu() -> str:
    """The processor's model name: what the emulated engine's numbers come from."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.processor())


@functools.cache
def _driver() -> str:
    """The NVIDIA driver's version, asked of NVML; empty where that library is not installed."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    if nvml.nvmlInit_v2() != 0:
        return ""
    text = ctypes.create_string_buffer(96)
    found = nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
    nvml.nvmlShutdown()
    return text.value.decode() if found else ""
