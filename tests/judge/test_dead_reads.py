"""A read whose owner is gone makes an arm wrong, however the replay that meets it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parity.judge.outcome import Outcome
from parity.judge.verdict import verdict_of
from parity.rows.family import Subject
from parity.rows.row import Row

from .judging import ENGINE, Scale, catalogue_of, judge, outcome_of


class Replacing(Scale):
    """Replaces its table on every call, as SenseNova does with its positions: the captured one is soon nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        offsets = self.table if self.table is not None else torch.ones(4, device=x.device)
        self.table = offsets.clone()
        return super().forward(x) + offsets


class Asserting:
    """A capture path whose third call ends in a device assert, as an index read from dead memory does on a GPU."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.graph: Any = None
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> Any:
        if self.graph is None:
            self.static = x.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.module(self.static)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.output = self.module(self.static)
            self.module.table = torch.ones(4, device=x.device)
        self.calls += 1
        if self.calls == 1:
            self.graph.replay()
            return self.module(x)
        raise RuntimeError("CUDA error: device-side assert triggered")

    def release(self) -> None:
        self.graph = None


def _catalogue(module: type[Scale]) -> Any:
    def build(settings: Any) -> Subject:
        made = module().eval()
        return Subject(made, made, native=lambda: Asserting(made))

    return catalogue_of(build, arms=("native",))


def test_a_replay_that_fails_after_a_read_died_is_wrong_and_not_broken(fresh: None) -> None:
    outcome = outcome_of(_catalogue(Replacing), "native")
    found = verdict_of(outcome, ENGINE)
    assert (found.verdict, found.check, found.cause) == ("wrong", "replay", "stale-address")
    assert "a replay failed after table (4,) float32" in found.detail
    assert "device-side assert" in found.detail
    assert "test_dead_reads.py" in found.where


def test_the_same_failure_without_a_dead_read_is_the_rows_own(fresh: None) -> None:
    outcome = outcome_of(_catalogue(Scale), "native")
    assert outcome.status == "broken"
    assert "device-side assert" in outcome.message


@pytest.mark.parametrize("module", [Replacing, Scale])
def test_the_parent_is_told_before_a_replay_that_could_take_the_process_down(fresh: None, module: type[Scale]) -> None:
    told: list[Outcome] = []
    judge(Row("zoo", "family", "task", arm="native"), _catalogue(module), ENGINE, report=told.append)
    expected = [("wrong", "stale-address")] if module is Replacing else []
    assert [(v.verdict, v.cause) for v in (verdict_of(o, ENGINE) for o in told)][:1] == expected
