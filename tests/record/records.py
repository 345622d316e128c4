"""Records as a run would leave them, made from outcomes."""

from __future__ import annotations

from typing import Any

from parity.judge.outcome import INFERENCE_CHECKS, TRAINING_CHECKS, Check, Outcome
from parity.record.evidence import EvidenceFile
from parity.record.line import Record, record_of
from parity.rows.family import Expect, Family, Input, Subject
from parity.rows.row import Row, Settings
from parity.rows.training import Training, TrainSubject

H200 = {
    "gpu": "NVIDIA H200",
    "arch": "sm90",
    "driver": "580.1",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "cudnn": "91900",
    "python": "3.12.3",
}
CPU = {"gpu": "", "arch": "", "driver": "", "torch": "2.14.1+cpu", "cuda": "", "cudnn": "", "python": "3.11.2"}
H200_NAME = "nvidia-h200-sm90-torch2.11.0-cu130"
CPU_NAME = "emulated-cpu-torch2.14.1"


def build(settings: Settings) -> Subject:
    raise AssertionError("records are made without building anything")


def inputs(size: int, batch: int) -> tuple[Any, ...]:
    return (Input((batch, 3, size, size)),)


def family(name: str = "yolox", task: str = "detect", zoo: str = "libreyolo", **declared: Any) -> Family:
    values: dict[str, Any] = {"sizes": (64, 128), "other_size": 96, "boundaries": ("", "whole")} | declared
    return Family(zoo, name, task, build, inputs, **values)


def passing(**figures: Any) -> list[Check]:
    return [Check(name, "passed", figures=figures if name == "capture" else {}) for name in INFERENCE_CHECKS]


def failing(name: str, cause: str, where: str = "", **figures: Any) -> list[Check]:
    before = INFERENCE_CHECKS[: INFERENCE_CHECKS.index(name)]
    told = f"{name} did not hold"
    return [*(Check(n, "passed") for n in before), Check(name, "failed", told, cause, where, figures)]


def record(
    arm: str = "graphed",
    checks: list[Check] | None = None,
    *,
    of: Family | None = None,
    size: int = 64,
    boundary: str = "",
    engine: str = "cuda",
    status: str = "judged",
    recorded: str = "2026-01-01T00:00:00.000+00:00",
    zoo_version: str = "1.6.0",
    environment: dict[str, Any] | None = None,
    **outcome: Any,
) -> Record:
    """One record; safe unless ``checks`` say otherwise."""
    of = of or family()
    row = Row(of.zoo, of.name, of.task, "inference", Settings(size, 1, of.dtype, boundary), arm)
    judged = status == "judged"
    values: dict[str, Any] = {
        "captures": int(judged),
        "replays": 6 if judged else 0,
        "leaves": ("predictions",),
        "seconds": {"build": 0.5, "judge": 1.25},
        "peak_memory": 1 << 20,
        "environment": (H200 if engine == "cuda" else CPU) if environment is None else environment,
        "probes": ({"name": "A", "seed": 7, "low": 0.0, "high": 1.0},),
    } | outcome
    found = Outcome(row.id, status, tuple(checks or passing()) if judged else (), **values)
    return record_of(found, row, of, engine, zoo_version, f"parity certify --row {row.id}", recorded=recorded)


def train(settings: Settings) -> TrainSubject:
    raise AssertionError("records are made without building anything")


def draw(settings: Settings, probe: str, seed: int) -> tuple[Any, ...]:
    raise AssertionError("records are made without drawing anything")


def training(name: str = "yolox", task: str = "detect", zoo: str = "libreyolo", **declared: Any) -> Training:
    return Training(zoo, name, task, train, draw, **{"size": 64, "seam": "the whole network"} | declared)


def told(name: str = "exact", *proof: str, cause: str = "", tensors: tuple[int, int] = (0, 240), **more: Any) -> dict[str, Any]:
    """What the judge says of a training row besides its checks."""
    sorting = {"exact": tensors[1] - tensors[0], "inside_set": 0, "inside_spread": 0, "outside": tensors[0]}
    seam = {"seam": "the whole network", "mechanism": "network"}
    return {"class": name, "proof": list(proof), "cause": cause, "tensors": list(tensors), "sorting": sorting, **seam} | more


def all_passed(**figures: Any) -> list[Check]:
    return [Check(name, "passed", figures=figures if name == "capture" else {}) for name in TRAINING_CHECKS]


def one_failed(name: str, cause: str, where: str = "") -> list[Check]:
    before = TRAINING_CHECKS[: TRAINING_CHECKS.index(name)]
    return [*(Check(n, "passed") for n in before), Check(name, "failed", f"{name} did not hold", cause, where)]


def trained(
    arm: str = "graphed",
    says: dict[str, Any] | None = None,
    *,
    of: Training | None = None,
    dtype: str = "float16",
    checks: list[Check] | None = None,
    engine: str = "cuda",
    status: str = "judged",
    recorded: str = "2026-01-01T00:00:00.000+00:00",
    zoo_version: str = "1.6.0",
    **outcome: Any,
) -> Record:
    """One record of a training row: certified and exact, unless ``says`` and ``checks`` say otherwise."""
    of = of or training()
    row = Row(of.zoo, of.name, of.task, "training", Settings(of.size, of.batch, dtype), arm)
    judged = status == "judged"
    shapes = (of.batch, 3, of.size, of.size), (of.batch, 5, 5)
    values: dict[str, Any] = {
        "captures": int(judged),
        "replays": 9 if judged else 0,
        "peak_memory": 3 << 28,
        "seconds": {"quorum": 2.0},
        "environment": H200 if engine == "cuda" else CPU,
        "probes": tuple({"probe": p, "shape": list(shape)} for p in "AB" for shape in shapes),
        "training": (told() if says is None else says) if judged else {},
    } | outcome
    found = Outcome(row.id, status, tuple(checks or all_passed()) if judged else (), **values)
    return record_of(found, row, of, engine, zoo_version, f"parity certify --row {row.id}", recorded=recorded)


def row_of(entry: Record) -> Row:
    return Row.parse(entry["id"])


def write(path: Any, *records: Record) -> Any:
    """An evidence file with these records, appended in this order."""
    file = EvidenceFile.open(path)
    for entry in records:
        file.append(entry)
    return path


YOLO9 = family(
    "yolo9",
    expected={
        "native": (Expect("wrong", "its anchor cache drops what the graph reads", "stale-address"),),
        "bare": (Expect("wrong", "its anchor cache drops what the graph reads", "stale-address"),),
    },
)
PPYOLOE = family(
    "ppyoloe",
    expected={
        arm: (Expect("uncapturable", "host tensors are moved in its forward", "h2d-copy"),) for arm in ("bare", "graphed", "native")
    },
)


NOISE = ("deterministic-algorithms", "substitutes")


def small_training() -> list[Record]:
    """Exact in three dtypes; noise that is proved; one that is proved in two dtypes only; a native path that rounds otherwise."""
    dfine, ec, rtmdet = training("dfine", seam="backbone and encoder"), training("ec"), training("rtmdet")
    classifier = training("resnet", "classify")
    noise = told("eager_noise", *NOISE, cause="nondeterministic-kernel", tensors=(31, 369), ops=["grid_sampler_2d_backward"])
    noise |= {"seam": dfine.seam, "mechanism": "encoder"}
    tried = told("", cause="", tensors=(4, 460), tried=[{"conditions": ["tf32-off"], "differing": 4}])
    cache = told("float_rounding", "autocast-cache-off", cause="autocast-cache", tensors=(4, 240), max_ulp=65, worst="head.0.weight")
    return [
        *(trained(of=classifier, dtype=dtype) for dtype in classifier.dtypes),
        *(trained(of=dfine, says=noise, dtype=dtype) for dtype in dfine.dtypes),
        *(trained(of=ec, dtype=dtype) for dtype in ("float16", "bfloat16")),
        trained(of=ec, says=tried, dtype="float32", checks=one_failed("proof", "unknown")),
        trained(of=rtmdet),
        trained("native", cache, of=rtmdet),
    ]


def small_matrix() -> list[Record]:
    """One family safe on every arm, one healed, one refused, one half vacuous, one that is not installed."""
    stale = failing("churn", "stale-address", "libreyolo/models/yolo9/nn.py:201 x = anchors | strides")
    copies = failing("capture", "h2d-copy", "libreyolo/models/ppyoloe/nn.py:577 torch.cat(anchors).to(device)")
    dead = family("clip", "classify", other_size=None)
    gone = family("sam", "segment")
    return [
        *(record(arm) for arm in ("bare", "graphed", "native")),
        record("bare", stale, of=YOLO9),
        record("graphed", of=YOLO9),
        record("native", stale, of=YOLO9),
        *(record(arm, copies, of=PPYOLOE, captures=0, replays=0) for arm in ("bare", "graphed", "native")),
        record("graphed", of=dead, leaves=("logits", "scale"), dead_leaves=("scale",)),
        record("graphed", of=gone, status="unavailable", message="its weights need the network"),
    ]
