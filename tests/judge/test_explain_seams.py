"""Where to cut: the largest pieces without a reason, captured and compared; what does not hold is looked at again or dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.judge.explain.seams import Proposal
from parity.judge.explain.study import judge, study, study_training
from parity.judge.subject import Bench
from parity.judge.train.step import TrainBench
from parity.rows.discovery import Catalogue
from parity.rows.family import Input, Subject, Zoo
from parity.rows.row import Row
from parity.rows.training import Training, TrainSubject
from parity.runtime.engine import engine
from parity.runtime.seams import Seam

from .judging import ENGINE, catalogue_of, subject

pytestmark = pytest.mark.usefixtures("one_thread")


def deep(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 if x.sum() > 0 else -1.0)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.layers = 0, deep()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x) * self.calls


class TwoStages(nn.Module):
    """Cut at methods, the second of which reads the device: birefnet's and depth_anything3's form."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = deep(), deep(), deep()

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.second(self.first(x))}

    def decode(self, features: dict[str, Tensor]) -> Tensor:
        x = features["x"]
        return self.last(x) if x.max() > 1e9 else self.last(-x)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Passes(nn.Module):
    """Its healthy stage is handed something that no graph can take."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.reads = Takes(), Reads()

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self.stage(x, {"any": object()}))


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()

    def forward(self, x: Tensor, options: Any) -> Tensor:
        return self.layers(x)


class InPlace(nn.Module):
    """Writes to its input: the runtime refuses it, and what is within it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = deep()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.add_(1))


def studied(build: Any, **more: Any) -> dict[str, Any]:
    catalogue = catalogue_of(build if more.get("whole") else lambda settings: subject(build()))
    row = Row("zoo", "family", "task", arm="eager")
    bench = Bench(row, catalogue.family(row), engine(ENGINE), 0)
    with bench.engine.entered(), torch.no_grad():
        return study(bench)


def paths(found: dict[str, Any]) -> list[str]:
    return [piece["path"] for piece in found["seam"]["pieces"]]


def test_a_method_before_the_reading_one_is_proposed_and_holds() -> None:
    found = studied(TwoStages)
    assert paths(found) == ["encode", "last"]
    assert found["seam"]["proof"] == "bits equal"
    assert found["seam"]["operations"] == pytest.approx(15 / found["operations"], abs=1e-3)
    assert found["seam"]["model"] == "TwoStages"


def test_the_proposal_is_ready_code() -> None:
    found = studied(TwoStages)
    made = eval(found["seam"]["code"], {"Seam": Seam})
    assert made.pieces == ("encode", "last")
    assert made.eager.startswith("host-sync at ")


def test_around_what_counts_the_rest_is_captured() -> None:
    """Nothing is refused there: the experiment names the line, and the pieces around it replay eager's bits."""
    found = studied(lambda: nn.Sequential(deep(), Counts(), deep()))
    assert found["finding"]["cause"] == "python-counter"
    assert found["divergence"]["module"] == "1"
    assert paths(found) == ["0", "1.layers", "2"]
    assert found["seam"]["proof"] == "bits equal"


def test_arguments_that_hide_tensors_leave_what_is_within() -> None:
    assert paths(studied(Passes)) == ["stage.layers"]


def test_a_piece_that_the_runtime_refuses_is_replaced_by_what_it_calls() -> None:
    found = studied(lambda: nn.Sequential(InPlace(), Reads()))
    assert paths(found) == ["0.layers"]
    assert found["seam"]["dropped"] == ["0: refused: input-mutation: the region writes to input 0, which a replay would not pass on"]


def test_layers_alike_are_worth_their_sum() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.reads = deep(), Reads()

        def forward(self, x: Tensor) -> Tensor:
            return self.reads(self.mlp(x))

    found = studied(lambda: nn.Sequential(*(Block() for _ in range(60))))
    assert paths(found) == [f"{i}.mlp" for i in range(48)], "each is one in sixty; together they are most of it"


def test_a_healthy_model_needs_no_cut() -> None:
    found = studied(deep)
    assert (found["reasons"], found["seam"]["code"], found["seam"]["proof"]) == ([], "", "")


def test_a_model_of_one_line_has_nothing_to_cut() -> None:
    found = studied(Reads)
    assert (paths(found), found["seam"]["proof"]) == ([], "nothing is left to capture")


def test_a_family_that_is_cut_already_is_studied_at_its_cut() -> None:
    """What runs outside of the region is nobody's reason."""

    def build(settings: Any) -> Subject:
        module = TwoStages().eval()
        return Subject(module, module.encode, compose=lambda region: lambda x: module.decode(region(x)))

    found = studied(build, whole=True)
    assert found["reasons"] == []
    assert found["operations"] == 10


def test_a_proposal_without_proof_does_not_hold() -> None:
    assert not Proposal(()).holds
    assert not Proposal((), proof="bits equal").holds


def test_the_study_is_an_outcome_and_other_arms_are_judged() -> None:
    catalogue: Catalogue = catalogue_of(lambda settings: subject(TwoStages()))
    outcome = judge(Row("zoo", "family", "task", arm="eager"), catalogue, ENGINE)
    assert (outcome.status, outcome.checks[0].name) == ("judged", "study")
    assert [r["cause"] for r in outcome.checks[0].figures["reasons"]] == ["host-sync"]
    assert judge(Row("zoo", "family", "task", arm="bare"), catalogue, ENGINE).checks[2].cause == "host-sync"


def test_a_module_that_works_in_training_mode_only_says_so() -> None:
    class Trains(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise ValueError("call fuse() first")
            return x.neg()

    outcome = judge(Row("zoo", "family", "task", arm="eager"), catalogue_of(lambda settings: subject(Trains())), ENGINE)
    assert outcome.status == "broken"
    assert "call fuse() first; in training mode it works: give a case file of that mode" in outcome.message
    assert "def loss(output, *inputs):" in outcome.message


# ---------------------------------------------------------------- training
class Detects(nn.Module):
    """A decoder with one query per target."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.backbone, self.decoder, self.reads = deep(), deep(), reads

    def forward(self, x: Tensor, count: int) -> Tensor:
        features = self.backbone(x)
        if self.reads:
            features = features * features.detach().mean().item()
        return self.decoder(features[:1].expand(count, 4))


def trained(build: Any, loss: Any, draw: Any = None) -> dict[str, Any]:
    def make(settings: Any) -> TrainSubject:
        module = build().train()
        return TrainSubject(module, module, lambda forward, *batch: loss(module, forward, *batch))

    def drawn(settings: Any, probe: str, seed: int) -> tuple[Any, ...]:
        return torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)), 2 if probe == "A" else 5

    family = Training("zoo", "family", "task", make, draw or drawn, batch=3, dtypes=("float32",))
    catalogue = Catalogue((Zoo("zoo", "torch", "", (family,), lambda: None, lambda: ""),), ())
    row = family.rows()[0]
    bench = TrainBench(row, catalogue.training(row), engine(ENGINE), 0)
    with bench.engine.entered():
        return study_training(bench)


def waits(module: Any, forward: Any, x: Tensor, count: int) -> Tensor:
    found = forward(x, count).square().mean()
    return found * (2.0 if found.item() > 0 else 1.0)  # type: ignore[no-any-return]


def test_in_training_what_follows_the_targets_stays_outside() -> None:
    found = trained(Detects, waits)
    assert found["reasons"] == [], "the loss is eager anyway"
    assert (paths(found), found["seam"]["proof"]) == (["backbone"], "bits equal")


def test_in_training_the_networks_own_reasons_are_the_rows() -> None:
    found = trained(lambda: Detects(reads=True), waits)
    assert [r["cause"] for r in found["reasons"]] == ["host-sync"]
    assert "features.detach().mean().item()" in found["reasons"][0]["where"]


def test_a_backward_is_looked_at_too() -> None:
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] * (1.0 if grads[0].sum().item() > 0 else 2.0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = deep()

        def forward(self, x: Tensor, count: int) -> Any:
            return Looks.apply(self.layers(x))

    found = trained(Net, lambda module, forward, x, count: forward(x, count).sum())
    assert [r["cause"] for r in found["reasons"]] == ["host-sync"]
    assert "grads[0].sum().item()" in found["reasons"][0]["where"]


def test_a_kept_autograd_graph_is_named() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = deep()
            self.last: Any = None

        def forward(self, x: Tensor, count: int) -> Tensor:
            self.last = self.inner(x)
            return self.last  # type: ignore[no-any-return]

    found = trained(Keeps, lambda module, forward, x, count: forward(x, count).sum())
    assert [(r["cause"], r["what"]) for r in found["reasons"]] == [("side-stream", "last keeps the autograd graph of an earlier step")]


def test_what_is_kept_for_one_size_is_a_stale_address_and_stays_outside() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.rows, self.table = deep(), -1, torch.zeros(0)

        def lookup(self, x: Tensor) -> Tensor:
            if self.rows != x.shape[0]:
                self.rows, self.table = x.shape[0], torch.arange(x.shape[0], device=x.device)[:, None] + 1.0
            return self.table

        def forward(self, x: Tensor) -> Tensor:
            return self.stem(x) * self.lookup(x)

    catalogue = catalogue_of(lambda s: subject(Caches()), lambda size, batch: (Input((size, 4)),), sizes=(3,), other_size=5)
    row = catalogue.zoos[0].families[0].rows()[0]
    bench = Bench(row, catalogue.family(row), engine(ENGINE), 0)
    with bench.engine.entered(), torch.no_grad():
        found = study(bench)
    assert (found["finding"]["cause"], found["divergence"]["piece"]) == ("stale-address", "lookup")
    assert paths(found) == ["stem"]
    assert "stale-address at " in found["seam"]["code"]
