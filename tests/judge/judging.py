"""Small families made in a test, and the verdict that the judge comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parity.judge.inference import judge
from parity.judge.outcome import Outcome
from parity.judge.verdict import Verdict, verdict_of
from parity.rows.discovery import Catalogue
from parity.rows.family import Family, Input, Subject, Zoo
from parity.rows.row import Row

ENGINE = "emulated"


class Scale(nn.Module):
    """Healthy, and small."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.weight


def subject(module: nn.Module, **more: Any) -> Subject:
    return Subject(module.eval(), module, **more)


def inputs(size: int, batch: int) -> tuple[Any, ...]:
    return (Input((batch, 4)),)


def catalogue_of(build: Callable[[Any], Any], inputs: Callable[[int, int], Any] = inputs, **more: Any) -> Catalogue:
    family = Family("zoo", "family", "task", build, inputs, **more)
    return Catalogue((Zoo("zoo", "torch", "", (family,), lambda: None, lambda: ""),), ())


def outcome_of(catalogue: Catalogue, arm: str = "bare") -> Outcome:
    return judge(Row("zoo", "family", "task", arm=arm), catalogue, ENGINE)


def verdict(row: Row, catalogue: Catalogue) -> Verdict:
    return verdict_of(judge(row, catalogue, ENGINE), ENGINE)


def failed(outcome: Outcome) -> list[str]:
    return [c.name for c in outcome.checks if c.status == "failed"]
