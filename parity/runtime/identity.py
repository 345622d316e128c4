"""Which certificate is somebody's own, and what this machine is: how a model and a training run ask the allowlist."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.runtime.allowlist import Allowlist, Certificate, Environment, arch_name, default_path, gap


@functools.cache
def _listed(path: str) -> Allowlist:
    return Allowlist.load(path)


def here(version: str) -> Environment:
    """This machine, with a zoo of ``version``."""
    arch = arch_name(torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""
    cudnn = str(torch.backends.cudnn.version() or "")
    return Environment(arch, torch.__version__, torch.version.cuda or "", cudnn, version)


def trained_gap(certificate: Certificate, leaves: list[Any], version: str) -> str:
    """Why a certificate of training does not cover a forward with these arguments, as a sentence; empty where it does."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    own = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else own
    return gap(certificate, here(version), [tuple(t.shape) for t in tensors], str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Identity:
    """``mode``: inference or training. ``version``: the zoo's."""

    zoo: str
    family: str
    task: str
    mode: str = "training"
    version: str = ""

    def __str__(self) -> str:
        return f"{self.zoo}/{self.family}/{self.task}/{self.mode}"

    @property
    def command(self) -> str:
        """What certifies it."""
        return f"parity certify --zoo {self.zoo} --family {self.family} --task {self.task} --mode {self.mode}"

    def unlisted(self, path: str | Path | None = None) -> str:
        """The sentence for an allowlist that does not hold it; ``path`` as for ``certificate``."""
        return (
            f"the allowlist {path or default_path()} holds no certificate for family {self.family!r}, task {self.task!r}, "
            f"mode {self.mode!r} of {self.zoo}; to certify it: `{self.command}`"
        )

    def certificate(self, path: str | Path | None = None) -> Certificate | None:
        """The one that fits this machine best; None where the allowlist at ``path`` (default: the packaged one) holds none. Raises
        AllowlistError."""
        found = _listed(str(path or default_path()))
        return found.find(self.zoo, self.family, self.task, self.mode, here(self.version))
