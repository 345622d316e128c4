"""Training steps that cannot be captured whole: cause, line and submodule are those that the model's source shows, the advice cures it,
and the pieces that are proposed instead are captured, with the bits that eager gives.

Small settings of the zoo's own trainers, so that the same lines run. Those of a zoo take up to half a minute each: leave them out with
``-k "not test_explain_training"``.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity.judge import training
from parity.judge.explain import calls, trial
from parity.judge.explain.study import study_training
from parity.judge.judging import judge
from parity.judge.train import walk
from parity.judge.train.step import TrainBench
from parity.judge.verdict import verdict_of
from parity.record.advice import advise
from parity.rows.discovery import Catalogue, discover
from parity.rows.row import Row, Settings
from parity.rows.training import TrainSubject
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
ROOT = Path(__file__).parents[2]
FOUR_AND_THREE = 27
"""A seed whose batches hold four and three boxes. A DETR denoises as many whole groups of them as fit in 100 queries: of 4, and of most
other counts, 100; of 3, 99."""


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge without a remembered reference, which looks at each side as often as it must: no noise is looked for here."""
    monkeypatch.setattr(training, "_MEMORY", training._Memory())
    monkeypatch.setattr(walk, "QUORUM", 2)
    monkeypatch.setattr(walk, "ARM_RUNS", 1)


def small(name: str, size: int) -> tuple[Catalogue, Row]:
    """A family of LibreYOLO in float32 at one size, one image at a time, and its row with our graphs."""
    pytest.importorskip("libreyolo")
    zoo = discover([ROOT / "families"]).zoo("libreyolo")
    zoo.warm()
    (family,) = [f for f in zoo.families if f.mode == "training" and f.name == name]
    family = replace(family, size=size, batch=1, other_size=None, dtypes=("float32",), accumulate=1)  # type: ignore[call-arg]
    row = next(row for row in family.rows() if row.arm == "graphed")
    return Catalogue((replace(zoo, families=(family,)),), ()), row


def bench_of(catalogue: Catalogue, row: Row, seed: int = 0) -> TrainBench:
    return TrainBench(row, catalogue.training(row), engine(ENGINE), seed)


def learned(catalogue: Catalogue, row: Row, seed: int = 0) -> dict[str, Any]:
    """With time at a standstill: on a busy machine any call may have taken a share of it that is worth a graph."""
    bench = bench_of(catalogue, row, seed)
    with pytest.MonkeyPatch.context() as patch, bench.engine.entered():
        patch.setattr(calls, "time", SimpleNamespace(perf_counter=lambda: 0.0))
        return study_training(bench)


def held(catalogue: Catalogue, row: Row) -> dict[str, Any]:
    """What is learned, once its cut is proved by a walk that trains every piece."""
    kept: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        steps = trial.eager_steps
        patch.setattr(trial, "eager_steps", lambda *given: kept.append(steps(*given)) or kept[-1])
        patch.setattr(trial, "LIMIT", 600.0)  # of a busy machine
        found = learned(catalogue, row, FOUR_AND_THREE)
    assert (found["seam"]["proof"], found["seam"]["dropped"]) == ("bits equal", [])
    for path in proposed(found):
        assert trains(kept[0], path), f"nothing is trained in {path}"
    return found


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


def tried(catalogue: Catalogue, row: Row, *paths: str, expected: Any = None) -> tuple[str, dict[str, str]]:
    """What comes of pieces under graphs: the first difference from eager, and those that were not replayed, with the reason.
    ``expected``: empty where bits are not to be compared."""
    bench, clock = bench_of(catalogue, row), trial.Clock(300)
    with bench.engine.entered():
        return trial.of_steps(bench, trial.eager_steps(bench, clock) if expected is None else expected, clock)(paths)


def trains(walked: trial.Walked, path: str) -> bool:
    """Whether a gradient of a piece is another one in the last step than in the first, in eager's walk."""
    first, last = (dict(leaf for bundle in walked[i] for leaf in bundle.leaves()) for i in (0, 3))
    names = [name for name in first if name.startswith(f"gradient {path}.")]
    return any(isinstance(first[name], Tensor) and not same_bits(first[name], last[name]) for name in names)


HOLDS = ("", {})


# ---------------------------------------------------------------- tinyformer
def test_tinyformer() -> None:
    encoder = pytest.importorskip("libreyolo.models.tinyformer.encoder")
    catalogue, row = small("tinyformer", 128)
    found = held(catalogue, row)
    line = line_of(encoder.HybridEncoder_4Scale.forward, ").to(src_flatten.device)")
    assert placed(found) == {("h2d-copy", line, "encoder")}
    assert found["reasons"][0]["what"] == "Tensor.to the device"
    assert "create it with device=x.device" in advised(found, line)
    pieces = proposed(found)
    expected = {"backbone", *(f"encoder.{kind}_blocks.{i}" for kind in ("fpn", "pan") for i in range(2))}
    assert set(pieces) - {"encoder.encoder.0"} == expected, "whether one small transformer layer is worth a graph, its time decides"


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
    found = held(catalogue, row)
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
    expected = {"backbone", *(f"encoder.{kind}_blocks.{i}" for kind in ("fpn", "pan") for i in range(3))}
    assert set(proposed(found)) == expected


def test_the_density_head_of_domedetr_is_cured_by_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    defe = pytest.importorskip("libreyolo.models.domedetr.defe").LiteDeFE
    catalogue, row = small("domedetr", 160)
    monkeypatch.setattr(trial, "STEPS", ("A", "B"))  # a replay, of other values
    different, failing = tried(catalogue, row, "encoder.DeFE", expected=[])
    assert different == ""
    assert line_of(defe.forward, "if density_max > 0").partition(" ")[0] in failing["encoder.DeFE"]
    branch = "if density_max > 0:\n        density = density / density_max"
    change(monkeypatch, defe, "forward", (branch, "density = density / torch.where(density_max > 0, density_max, 1.0)"))
    assert tried(catalogue, row, "encoder.DeFE") == HOLDS


# ---------------------------------------------------------------- a DETR whose network is captured whole
def test_the_split_of_a_detr_holds() -> None:
    catalogue, row = small("dfine", 256)
    found = held(catalogue, row)
    assert (placed(found), proposed(found)) == (set(), ["backbone", "encoder"])


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
    assert piece["operations"] == 5 / 20, "of the model, whose loss takes three more"
    assert found["seam"]["proof"] == "bits equal"
    different, failing = tried(catalogue, row, "single", "shared")
    assert (different, set(failing)) == ("", {"shared"})
    assert failing["shared"].endswith(": the forward before still waits for its backward"), "half of its calls are eager"


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
