"""What the tests of the doors share: a small zoo with its controls, and a pool that knows its verdicts without any process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.certification import STUDY
from parity.judge.outcome import TRAINING_CHECKS, Check, Outcome
from parity.rows.row import Row
from parity.run.isolate import Options
from parity.run.nursery import NoDevice, RunError

ROOT = Path(__file__).parents[1]

MODELS = """
from parity.rows.family import Expect, Family, Input, Subject, Zoo
from parity.rows.training import Training, TrainSubject

def build(kind):
    def make(settings):
        import torch
        class Model(torch.nn.Module):
            calls = 0
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(4))
                if kind == "reads":
                    self.stem = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
            def forward(self, x):
                self.calls += 1
                if kind == "reads":
                    x = self.stem(x)
                    if x.sum() > 4:
                        x = -x
                if kind == "waits":
                    import time
                    time.sleep(600)
                return x * self.weight * (self.calls if kind == "counts" else 1)
        module = Model().eval()
        return Subject(module, module)
    return make

def inputs(size, batch):
    return (Input((batch, 4)),)

def warm():
    import torch

def family(name, kind, zoo, task="detect", arms=("bare", "graphed"), **more):
    return Family(zoo, name, task, build(kind), inputs, arms=arms, **more)

def train(settings):
    import torch
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return TrainSubject(module, module, lambda forward, x, y: (forward(x).float() - y).square().mean())

def draw(settings, probe, seed):
    import torch
    generator = torch.Generator().manual_seed(seed + ord(probe))
    return tuple(torch.rand(settings.batch, n, generator=generator) for n in (4, 1))

def training(name, zoo, task="detect", **more):
    return Training(zoo, name, task, train, draw, **more)

def wrong(cause="python-counter"):
    expect = Expect("wrong", "scales every result by a Python counter", cause, check="replay")
    return {"bare": (expect,), "graphed": (expect,)}
"""
SMALL = """
from ._models import *

ZOO = Zoo("small", "torch", "pip install torch", (
    family("healthy", "plain", "small"),
    family("healthy", "plain", "small", "pose"),
    family("ec", "plain", "small", arms=("graphed",)),
    family("known", "counts", "small", expected=wrong()),
    family("sabotaged", "counts", "small", arms=("bare",)),
    family("better", "plain", "small", arms=("bare",), expected=wrong()),
    family("gone", "plain", "small", unavailable="its weights need the network"),
), warm, lambda: "1.0")
"""
TRAINED = """
    training("healthy", "small"),
    training("noisy", "small", arms=("graphed",)),
    training("unproven", "small", arms=("graphed",), dtypes=("float32",)),
"""
TRAINED_CONTROLS = """
    training("must_drop", "controls", "sabotaged", dtypes=("float32",), arms=("bare",), expected=wrong()),
    training("must_train", "controls", "healthy", dtypes=("float32",), arms=("graphed",)),
"""
CONTROLS = """
from ._models import *

ZOO = Zoo("controls", "torch", "pip install torch", (
    family("must_fail", {must_fail!r}, "controls", "sabotaged", ("bare",), expected=wrong()),
    family("must_pass", "plain", "controls", "healthy", ("graphed",)),{trained}
), warm, lambda: "1.0")
"""
CASE = """
import torch
MODE = "inference"
class Counts(torch.nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return x * self.calls
def build():
    return Counts()
def probes(device):
    return (torch.rand(1, 8).to(device),), (torch.randn(1, 8).to(device),)
"""
COUNTING = ("known", "sabotaged", "must_fail", "must_drop")
NOISE = ("cudnn-deterministic", "math-sdpa")


def write_families(folder: Path, name: str = "families", *, survivor: bool = False, extra: str = "", training: bool = False) -> Path:
    """``folder/name``; ``survivor``: the control that must fail does not. ``extra``: more families of the small zoo. ``training``: it
    and the controls have rows of training too.
    """
    made = folder / name
    made.mkdir()
    (made / "__init__.py").write_text("")
    (made / "_models.py").write_text(MODELS)
    (made / "small.py").write_text(SMALL.replace("), warm", f"{extra}{TRAINED if training else ''}), warm"))
    controls = CONTROLS.format(must_fail="plain" if survivor else "counts", trained=TRAINED_CONTROLS if training else "")
    (made / "controls.py").write_text(controls)
    return made


def fake_probe(sources: Sequence[str], engine: str = "auto", zoos: Sequence[str] = ()) -> Mapping[str, Any]:
    if engine == "cuda":
        raise NoDevice("the engine cuda was demanded, but torch finds no device")
    return {"engine": "emulated", "devices": [], "environment": {"torch": "2.14.1", "zoos": {z: {"zoo": "1.0"} for z in zoos}}}


def outcome_of(row: Row, survivor: bool = False) -> Outcome:
    """What the judge would say of a row of the small zoo."""
    if row.family == "gone":
        return Outcome(row.id, "unavailable", message="its weights need the network")
    if row.mode == "training":
        return _trained(row, survivor)
    if row.family in COUNTING and not survivor:
        check = Check("replay", "failed", "call B: output: 4 of 4 elements", "python-counter", "_models.py:20 return x * self.calls")
        return Outcome(row.id, "judged", (Check("capture", "passed"), check), captures=1, replays=2)
    return Outcome(
        row.id, "judged", (Check("capture", "passed"), Check("replay", "passed")), captures=1, replays=5, seconds={"arm": 1.0}
    )


def _trained(row: Row, survivor: bool) -> Outcome:
    """Noise is of class eager_noise; what counts drops a gradient; all else is exact."""
    failed = {"unproven": "proof", **dict.fromkeys(() if survivor else COUNTING, "replay")}.get(row.family, "")
    checks = [Check(name, "passed") for name in TRAINING_CHECKS]
    told = {"class": "exact", "proof": [], "cause": "", "tensors": [0, 4], "seam": "the whole network"}
    if row.family == "noisy":
        told |= {"class": "eager_noise", "proof": list(NOISE), "cause": "nondeterministic-kernel", "tensors": [3, 4]}
    if failed:
        told["class"] = ""
        cause = "unknown" if failed == "proof" else "python-counter"
        checks = [c for c in checks if c.name not in (failed, "trajectory")] + [Check(failed, "failed", "3 of 4 differ", cause)]
    return Outcome(row.id, "judged", tuple(checks), captures=1, replays=9, seconds={"arm": 2.0}, training=told)


def studied(row: Row) -> Outcome:
    """What a study of a row that counts would find."""
    where = "_models.py:20 return x * self.calls"
    piece = {"path": "stem", "operations": 0.75, "seconds": 0.5, "calls": 1}
    seam = {"model": "Model", "code": "Seam(pieces=('stem',), reason='it counts')", "pieces": [piece], "proof": "bits equal"}
    figures = {
        "reasons": [],
        "finding": {"cause": "python-counter", "where": where, "detail": "equal calls multiply by 1, then by 2"},
        "divergence": {"call": 2, "probe": "B", "piece": "head", "module": "head", "operation": "aten::mul", "where": where},
        "seam": seam | {"dropped": [], "operations": 0.75, "seconds": 0.5},
        "stopped": "",
        "unseen": ["a library"],
    }
    return Outcome(row.id, "judged", (Check("study", "passed", figures=figures),))


class FakePool:
    """As run.isolate.Pool; ``judged``: ids in order, of all pools, ``explained``: those of pools that study. ``interrupt_after``: rows
    until somebody presses Ctrl-C, ``studies_until``: studies until then. ``failing``: families whose study dies; ``broken``: the run of
    a pool that studies cannot go on."""

    judged: list[str] = []  # noqa: RUF012
    explained: list[str] = []  # noqa: RUF012
    asked: list[Options] = []  # noqa: RUF012
    studies_until = -1
    failing: tuple[str, ...] = ()
    broken = ""
    survivor = False
    interrupt_after = -1

    def __init__(self, options: Options, warming: Any = None) -> None:
        self.options = options
        self.asked.append(options)

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(
        self, groups: Sequence[Sequence[Row]], hints: Mapping[str, float] | None = None, suspects: Iterable[str] = ()
    ) -> Iterator[Outcome]:
        if self.options.judge == STUDY:
            yield from self._study([row for group in groups for row in group])
            return
        for count, row in enumerate(row for group in groups for row in group):
            if count == self.interrupt_after:
                raise KeyboardInterrupt
            self.judged.append(row.id)
            yield outcome_of(row, self.survivor and row.family == "must_fail")

    def _study(self, rows: Sequence[Row]) -> Iterator[Outcome]:
        for count, row in enumerate(rows):
            if count == self.studies_until:
                raise KeyboardInterrupt
            if self.broken:
                raise RunError(self.broken)
            self.explained.append(row.id)
            died = Outcome(row.id, "timed_out", message="took longer than 300 s")
            yield died if row.family in self.failing else studied(row)


def patch_in() -> None:
    """For a pytest of its own: its conftest calls this."""
    from parity import certification

    certification.Pool = FakePool  # type: ignore[misc,assignment]
    certification.probe = fake_probe
    with contextlib.suppress(FileNotFoundError):
        FakePool.survivor = Path("survivor").read_text() == "yes"
