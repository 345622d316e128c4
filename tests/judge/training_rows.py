"""Small training families made in a test, and what the judge says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parity.judge.judging import judge
from parity.judge.outcome import Outcome
from parity.judge.verdict import Verdict, verdict_of
from parity.rows.discovery import Catalogue
from parity.rows.family import Zoo
from parity.rows.row import Settings
from parity.rows.training import Training, TrainSubject

ENGINE = "emulated"


def draw(settings: Settings, probe: str, seed: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed + "AB".index(probe))
    return torch.randn(settings.batch, 6, generator=generator), torch.rand(settings.batch, 4, generator=generator)


def near(forward: Callable[..., Any], x: Any, y: Any) -> Any:
    out = forward(x)
    return ((out[0] if isinstance(out, tuple) else out) - y).square().mean()


def catalogue_of(build: Callable[[Settings], Any], draw: Callable[..., Any] = draw, **more: Any) -> Catalogue:
    options = {"batch": 6, "dtypes": ("float32",), "arms": ("bare", "graphed", "native"), "accumulate": 1, **more}
    family = Training("zoo", "family", "training", build, draw, **options)
    return Catalogue((Zoo("zoo", "torch", "", (family,), lambda: None, lambda: ""),), ())


def of(kind: Callable[[], nn.Module], loss: Callable[..., Any] = near, native: Any = None, **more: Any) -> Catalogue:
    """One family around a kind of module. ``native``: a manager's class."""

    def build(settings: Settings) -> TrainSubject:
        module = kind().train()
        return TrainSubject(module, module, loss, native=None if native is None else lambda: native(module))

    return catalogue_of(build, **more)


def outcome_of(catalogue: Catalogue, arm: str = "graphed") -> Outcome:
    (family,) = catalogue.zoos[0].families
    return judge(next(r for r in family.rows() if r.arm == arm), catalogue, ENGINE)


def verdict(outcome: Outcome) -> Verdict:
    return verdict_of(outcome, ENGINE)


def failed(outcome: Outcome) -> list[str]:
    return [c.name for c in outcome.checks if c.status == "failed"]
