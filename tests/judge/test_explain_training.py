"""Training steps that cannot be captured whole: cause, line and submodule are those that the model's source shows, the advice cures it,
and the pieces that are proposed instead are captured, with the bits that eager gives.

Small settings of the zoo's own trainers, so that the same lines run. Those of a zoo take up to a minute each: leave them out with
``-k "not test_explain_training"``.
"""

from __future__ import annotations

import copy
import inspect
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.judge import training
from parity.judge.explain.study import study_training
from parity.judge.judging import judge
from parity.judge.subject import seed_everything
from parity.judge.train.step import TrainBench
from parity.judge.verdict import verdict_of
from parity.record.advice import advise
from parity.rows.discovery import Catalogue, discover
from parity.rows.row import Row, Settings
from parity.rows.training import TrainSubject
from parity.runtime import TrainGraphs
from parity.runtime.engine import engine
from parity.runtime.state import same_bits

from .test_explain_models import line_of, short
from .training_rows import ENGINE, catalogue_of, near

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
    ),  # the zoos' own
]
Log = dict[str, Tensor | None]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_MEMORY", training._Memory())


def small(name: str, size: int) -> tuple[Catalogue, Row]:
    """A family of LibreYOLO in float32 at one size, and its row with our graphs."""
    pytest.importorskip("libreyolo")
    zoo = discover([ROOT / "families"]).zoo("libreyolo")
    zoo.warm()
    (family,) = [f for f in zoo.families if f.mode == "training" and f.name == name]
    family = replace(family, size=size, other_size=None, dtypes=("float32",), accumulate=1)  # type: ignore[call-arg]
    row = next(row for row in family.rows() if row.arm == "graphed")
    return Catalogue((replace(zoo, families=(family,)),), ()), row


def bench_of(catalogue: Catalogue, row: Row) -> TrainBench:
    return TrainBench(row, catalogue.training(row), engine(ENGINE), 0)


def learned(catalogue: Catalogue, row: Row) -> dict[str, Any]:
    bench = bench_of(catalogue, row)
    with bench.engine.entered():
        return study_training(bench)


def placed(found: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Cause, line and submodule."""
    return {(r["cause"], short(r["where"]), r["module"]) for r in found["reasons"]}


def proposed(found: dict[str, Any]) -> list[str]:
    return [piece["path"] for piece in found["seam"]["pieces"]]


def advised(found: dict[str, Any], line: str) -> str:
    (reason,) = [r for r in found["reasons"] if short(r["where"]) == line]
    return advise(reason["cause"], reason["what"])


def change(patch: pytest.MonkeyPatch, owner: Any, name: str, *changes: tuple[str, str]) -> None:
    """Changes the text of ``owner.name``, until the end of the test."""
    function = inspect.unwrap(getattr(owner, name))
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert old in text, f"{name} has no {old!r} any more"
        text = text.replace(old, new)
    made: dict[str, Any] = {}
    exec(compile(text, inspect.getsourcefile(function) or "", "exec"), function.__globals__, made)
    patch.setattr(owner, name, made[name])


def walked(bench: TrainBench, paths: list[str], steps: int = 4) -> tuple[list[Log], dict[str, TrainGraphs]]:
    """Steps on both batches in turn, weights updated after each, the pieces replayed from graphs: the loss, gradients, weights,
    buffers and the random stream after each."""
    subject = bench.build()
    graphs: dict[str, TrainGraphs] = {}
    for path in paths:
        piece = subject.module.get_submodule(path)
        graphs[path] = TrainGraphs(copy.copy(piece), threshold=1)  # the same parameters under a forward of its own
        piece.forward = graphs[path]  # type: ignore[assignment]
    logs: list[Log] = []
    for number in range(steps):
        seed_everything(number)
        subject.module.zero_grad(set_to_none=True)
        loss = subject.loss(subject.network, *bench.args("AB"[number % 2]))
        loss.backward()
        logs.append({"loss": loss.detach().clone(), **left(subject.module)})
        with torch.no_grad():
            for parameter in subject.module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.001)
    return logs, graphs


def left(module: nn.Module) -> Log:
    gradients = {f"gradient {name}": None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    held = {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    return {**gradients, **held, "generator": torch.cuda.get_rng_state()}


def differing(actual: Log, expected: Log) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name, a in actual.items() if not alike(a, expected[name])]


def alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else same_bits(a, b)


def replayed(catalogue: Catalogue, row: Row, paths: list[str]) -> dict[str, tuple[int, int, str]]:
    """Captures and replays of each piece, and why it is eager for good, once a walk with them has eager's bits."""
    bench = bench_of(catalogue, row)
    with bench.engine.entered():
        expected, _ = walked(bench, [])
        actual, graphs = walked(bench, paths)
    assert [differing(*pair) for pair in zip(actual, expected, strict=True)] == [[]] * len(expected)
    moved = differing(expected[0], expected[-1])
    assert "loss" in moved
    for path in paths:
        assert any(name.startswith(f"gradient {path}.") for name in moved), f"nothing is trained in {path}"
    return {path: (made.captures, made.replays, made.reason) for path, made in graphs.items()}


HELD = (1, 3, "")
"""Of four steps the first told how gradients arrive; one graph replayed the others."""


# ---------------------------------------------------------------- tinyformer
def test_tinyformer() -> None:
    encoder = pytest.importorskip("libreyolo.models.tinyformer.encoder")
    catalogue, row = small("tinyformer", 128)
    found = learned(catalogue, row)
    line = line_of(encoder.HybridEncoder_4Scale.forward, ").to(src_flatten.device)")
    assert placed(found) == {("h2d-copy", line, "encoder")}
    assert found["reasons"][0]["what"] == "Tensor.to the device"
    assert "create it with device=x.device" in advised(found, line)
    pieces = proposed(found)
    expected = {"backbone", *(f"encoder.{kind}_blocks.{i}" for kind in ("fpn", "pan") for i in range(2))}
    assert set(pieces) - {"encoder.encoder.0"} == expected, "whether one small transformer layer is worth a graph, its time decides"
    assert replayed(catalogue, row, pieces) == dict.fromkeys(pieces, HELD)


def test_tinyformer_is_refused_as_the_study_says() -> None:
    encoder = pytest.importorskip("libreyolo.models.tinyformer.encoder").HybridEncoder_4Scale
    catalogue, row = small("tinyformer", 128)
    verdict = verdict_of(judge(row, catalogue, ENGINE), ENGINE)
    line = line_of(encoder.forward, ").to(src_flatten.device)")
    assert (verdict.verdict, verdict.cause, short(verdict.where)) == ("uncapturable", "h2d-copy", line)


def test_tinyformer_is_cured_by_a_position_embedding_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = pytest.importorskip("libreyolo.models.tinyformer.encoder").HybridEncoder_4Scale
    catalogue, row = small("tinyformer", 128)
    given = "self.pe_temperature\n            ).to(src_flatten.device)"
    change(monkeypatch, encoder, "forward", (given, "self.pe_temperature, src_flatten.device\n            )"))
    on_device = ("temperature=10000.0)", "temperature=10000.0, device=None)"), ("=torch.float32)", "=torch.float32, device=device)")
    change(monkeypatch, encoder, "build_2d_sincos_position_embedding", *on_device)
    outcome = judge(row, catalogue, ENGINE)
    assert verdict_of(outcome, ENGINE).verdict == "screened", outcome
    assert outcome.training["class"] == "exact"
    assert outcome.training["trajectory"]["replayed"] >= 4


# ---------------------------------------------------------------- domedetr
def test_domedetr() -> None:
    """No line cures it: what it does with windows follows the values. What is proposed holds."""
    defe = pytest.importorskip("libreyolo.models.domedetr.defe")
    from libreyolo.models.domedetr import encoder, mwas

    catalogue, row = small("domedetr", 160)
    found = learned(catalogue, row)
    dome, windows = encoder.DomeHybridEncoder, mwas.WindowProcessor
    density = line_of(defe.LiteDeFE.forward, "if density_max > 0")
    count = line_of(windows._forward_gather, "torch.nonzero(defe_mask[b])")
    assert placed(found) == {
        ("host-sync", density, "encoder.DeFE"),
        ("host-sync", line_of(dome.adaptive_defe_filter, "if bool(candidate.any())"), "encoder"),
        ("h2d-copy", line_of(dome.forward, ".to(proj_feats[1].device)"), "encoder"),
        ("h2d-copy", line_of(windows._get_rel_embedding, "coords.to("), "encoder.mwas_processor"),
        ("data-dependent-shape", count, "encoder.mwas_processor"),
        ("host-sync", line_of(windows._process_windows, "windows[i, j]"), "encoder.mwas_processor"),
        ("host-sync", line_of(windows._get_abs_embedding, "return global_emb["), "encoder.mwas_processor"),
        ("host-sync", line_of(windows._reconstruct_features, "reconstructed["), "encoder.mwas_processor"),
        ("h2d-copy", line_of(dome.forward, ").to(src_flatten.device)"), "encoder"),
    }
    first = found["reasons"][0]
    assert (short(first["where"]), first["what"]) == (density, "aten::_local_scalar_dense")
    assert "torch.where" in advised(found, density)
    assert "a mask that is carried along" in advised(found, count)
    pieces = proposed(found)
    expected = {"backbone", *(f"encoder.{kind}_blocks.{i}" for kind in ("fpn", "pan") for i in range(3))}
    assert set(pieces) - {"encoder.DeFE.defe"} == expected, "whether the trunk of the density head is worth a graph, its time decides"
    assert replayed(catalogue, row, pieces) == dict.fromkeys(pieces, HELD)


def test_the_density_head_of_domedetr_is_cured_by_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    defe = pytest.importorskip("libreyolo.models.domedetr.defe").LiteDeFE
    catalogue, row = small("domedetr", 160)
    bench = bench_of(catalogue, row)
    with bench.engine.entered():
        _, graphs = walked(bench, ["encoder.DeFE"], steps=2)
    refused = graphs["encoder.DeFE"]
    assert refused.captures == 0
    assert line_of(defe.forward, "if density_max > 0").partition(" ")[0] in refused.reason
    branch = "if density_max > 0:\n        density = density / density_max"
    change(monkeypatch, defe, "forward", (branch, "density = density / torch.where(density_max > 0, density_max, 1.0)"))
    assert replayed(catalogue, row, ["encoder.DeFE"]) == {"encoder.DeFE": HELD}


# ---------------------------------------------------------------- a DETR whose network is captured whole
def test_the_split_of_a_detr_holds() -> None:
    catalogue, row = small("dfine", 256)
    found = learned(catalogue, row)
    assert (placed(found), proposed(found)) == (set(), ["backbone", "encoder"])
    assert replayed(catalogue, row, ["backbone", "encoder"]) == {"backbone": HELD, "encoder": HELD}


# ---------------------------------------------------------------- what a cut of a training step must know
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).mul(0.5).add(x).sub(0.1)


class Shared(nn.Module):
    """One block is called once, one twice, and the host looks at what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.shared, self.head = Block(), Block(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.shared(self.shared(self.single(x)))
        return self.head(x) * (2.0 if x.sum() > 0 else 1.0)


class Around(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Looks(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.max())


def build(module: nn.Module) -> TrainSubject:
    return TrainSubject(module.train(), Around(module), near)


def first(catalogue: Catalogue) -> tuple[Catalogue, Row]:
    (family,) = catalogue.zoos[0].families
    return catalogue, next(row for row in family.rows() if row.arm == "graphed")


def test_a_piece_that_a_step_calls_twice_is_not_proposed() -> None:
    def made(settings: Settings) -> TrainSubject:
        return build(Shared())

    catalogue, row = first(catalogue_of(made))
    found = learned(catalogue, row)
    assert proposed(found) == ["single"]
    (piece,) = found["seam"]["pieces"]
    assert piece["operations"] == pytest.approx(5 / 20), "of the model, whose loss takes three more"
    bench = bench_of(catalogue, row)
    with bench.engine.entered():
        _, graphs = walked(bench, ["single", "shared"])
    assert graphs["single"].replays == 3
    assert not graphs["single"].eager["the forward before still waits for its backward"]
    assert graphs["shared"].eager["the forward before still waits for its backward"] >= 2, "half of its calls are eager"


def test_a_reason_is_placed_in_the_model_and_not_in_the_wrapper() -> None:
    class Model(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.single = Looks()

    def made(settings: Settings) -> TrainSubject:
        return build(Model())

    found = learned(*first(catalogue_of(made)))
    lines = line_of(Looks.forward, "float(x.max())"), line_of(Shared.forward, "if x.sum() > 0")
    assert placed(found) == {("host-sync", lines[0], "single"), ("host-sync", lines[1], "")}
