"""Small models of ours, one mechanism each: sabotaged ones that must fail, by the check named beside them, and healthy look-alikes
that must pass. They run in every certification; a sabotaged one that survives voids the run."""

from __future__ import annotations

import importlib.metadata

from parity.rows.family import Zoo

from .healthy import FAMILIES as HEALTHY
from .sabotaged import FAMILIES as SABOTAGED


def _warm() -> None:
    import torch  # noqa: F401

    from . import models, natives  # noqa: F401


def _version() -> str:
    return importlib.metadata.version("torch")


ZOO = Zoo("controls", "torch", "pip install torch", (*SABOTAGED, *HEALTHY), _warm, _version)
