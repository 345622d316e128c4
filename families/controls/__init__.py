"""Small models of ours, one mechanism each: sabotaged ones that must fail, by the check named beside them, and healthy look-alikes
that must pass; for training, one for each class and each cause, too. They run in every certification; a sabotaged one that survives
voids the run."""

from __future__ import annotations

import importlib.metadata

from parity.rows.family import Zoo

from .healthy import FAMILIES as HEALTHY
from .sabotaged import FAMILIES as SABOTAGED
from .training import FAMILIES as TRAINING


def _warm() -> None:
    import torch  # noqa: F401

    from . import models, natives, training_models, training_natives  # noqa: F401


def _version() -> str:
    return importlib.metadata.version("torch")


ZOO = Zoo("controls", "torch", "pip install torch", (*SABOTAGED, *HEALTHY, *TRAINING), _warm, _version)
