"""What was measured: lines of ``reports/bench/<environment>.jsonl``, their table, and the shapes at which eager is the faster way."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from parity.record.files import RecordError, write_atomic
from parity.record.line import environment_name
from parity.record.markdown import code, table
from parity.rows.row import Row
from parity.runtime.allowlist import Allowlist, Tried

SCHEMA: Final = 1
EMULATED: Final = "The device was emulated: these times say nothing about any GPU, only that the bench works."


@dataclass(frozen=True)
class Spread:
    """Lower quartile, median and upper quartile."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """One row against eager, measured in turns in one process that had the device to itself.

    Times in microseconds. ``eager``, ``time``: per call of many in a row. ``host_eager``, ``host``: until one call returns.
    ``network``: forward and backward of what is captured, eagerly; None for inference. ``capture``: milliseconds of the call that
    captured. Memory in bytes, reserved at most while calls ran, weights included; ``memory_capture``: while it captured. ``shapes``,
    ``dtype``: of what is captured.
    """

    row: str
    engine: str
    eager: Spread
    time: Spread
    host_eager: Spread
    host: Spread
    network: Spread | None
    capture: float
    memory_eager: int
    memory: int
    memory_capture: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    repeat: int
    environment: Mapping[str, Any]
    zoo_version: str
    command: str
    recorded: str

    @property
    def speedup(self) -> float:
        return self.eager.middle / self.time.middle

    @property
    def share(self) -> float | None:
        """The network's part of an eager step; None for inference."""
        return None if self.network is None else min(1.0, self.network.middle / self.eager.middle)

    @property
    def ceiling(self) -> float | None:
        """The speed-up of a step whose network takes no time at all (Amdahl); infinite where nothing else takes any."""
        if self.share is None:
            return None
        return 1 / (1 - self.share) if self.share < 1 else math.inf

    @property
    def slower(self) -> bool:
        """Whether eager is the faster way beyond the spread of both."""
        return self.time.low > self.eager.high

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Raises ValueError for what is none."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}, this version reads {SCHEMA}")
        values = {key: value for key, value in data.items() if key != "schema"}
        if wrong := sorted(set(values) ^ {f.name for f in fields(cls)}):
            raise ValueError(f"lacks or has too much: {', '.join(wrong)}")
        Row.parse(values["row"])
        try:
            for name in ("eager", "time", "host_eager", "host", "network"):
                values[name] = _spread(values[name])
            values["shapes"] = tuple(tuple(shape) for shape in values["shapes"])
        except TypeError as error:
            raise ValueError(f"not a measurement: {error}") from None
        return cls(**values)


def _spread(value: Any) -> Spread | None:
    return None if value is None else Spread(**value) if isinstance(value, Mapping) else Spread(*value)


def measurement_of(row: Row, engine: str, figures: Mapping[str, Any], **facts: Any) -> Measurement:
    """From the figures of a child (``run.bench.figures_of``). ``facts``: environment, zoo_version, command, recorded."""
    known = {"schema": SCHEMA, "row": row.id, "engine": engine, "zoo_version": "", "command": "", "recorded": ""}
    return Measurement.from_dict({**known, **figures, **facts})


# ---------------------------------------------------------------- files
def bench_path(reports: str | Path, environment: Mapping[str, Any], engine: str) -> Path:
    return Path(reports) / "bench" / f"{environment_name(environment, engine)}.jsonl"


def read_bench(path: str | Path) -> list[Measurement]:
    """The measurements of a file, sorted by row. Raises RecordError naming file and line."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror or error})") from error
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            found.append(Measurement.from_dict(json.loads(line)))
        except (ValueError, AttributeError) as error:
            raise RecordError(f"{path}:{number}: {error}; take the line out and measure again with `parity bench`") from None
    return sorted(found, key=lambda m: m.row)


def read_benches(reports: str | Path) -> dict[str, list[Measurement]]:
    """Every environment's measurements by its name; empty where nothing was measured."""
    return {path.stem: read_bench(path) for path in sorted((Path(reports) / "bench").glob("*.jsonl"))}


def write_bench(path: str | Path, measurements: Iterable[Measurement]) -> None:
    """Adds measurements to a file, in the place of earlier ones of the same rows; replaced as a whole. Raises RecordError."""
    path = Path(path)
    kept = {m.row: m for m in (read_bench(path) if path.exists() else [])}
    kept.update({m.row: m for m in measurements})
    write_atomic(path, "".join(json.dumps(kept[row].to_dict(), sort_keys=True) + "\n" for row in sorted(kept)))


# ---------------------------------------------------------------- what follows from them
def with_slower(allowlist: Allowlist, benches: Mapping[str, Sequence[Measurement]]) -> Allowlist:
    """Certificates that say at which shapes ``"auto"`` should not capture: measured on the certificate's own environment and versions,
    our runtime slower than eager beyond the spread of both."""
    found: dict[tuple[str, ...], set[Tried]] = {}
    for name, measurements in benches.items():
        for m in measurements:
            row = Row.parse(m.row)
            if m.engine == "cuda" and row.arm == "graphed" and row.settings.dtype == m.dtype and m.slower:
                key = f"{row.zoo}/{row.family}/{row.task}/{row.mode}", name, m.zoo_version, str(m.environment.get("cudnn") or "")
                found.setdefault(key, set()).add(Tried(row.settings.size, row.settings.batch, m.dtype, m.shapes))
    certificates = []
    for c in allowlist.certificates:
        slower = found.get((c.id, c.measured_on, c.environment.zoo, c.environment.cudnn), set())
        certificates.append(replace(c, slower=tuple(sorted(slower))))
    return replace(allowlist, certificates=tuple(certificates))


def bench_table(measurements: Iterable[Measurement]) -> str:
    """Markdown: a line a row, inference before training, smaller sizes and batches first. Empty for none."""
    listed = sorted(measurements, key=_order)
    return table([_line(m) for m in listed])


def bench_section(benches: Mapping[str, Sequence[Measurement]]) -> str:
    """Markdown of every environment's measurements, those of a real device first; empty for none."""
    parts = []
    for name, measurements in sorted(benches.items(), key=lambda item: (item[0].startswith("emulated"), item[0])):
        if measurements:
            emulated = [EMULATED] if any(m.engine != "cuda" for m in measurements) else []
            parts += [f"**{name}**", *emulated, bench_table(measurements)]
    told = (
        "Milliseconds per call or training step, medians with quartiles, eager and the arm in turns, one row at a time on the device. "
        "Host: until the call returns. Ceiling: the speed-up of a step whose network takes no time."
    )
    return "\n\n".join([told, *parts]) if parts else ""


def _order(m: Measurement) -> tuple[Any, ...]:
    row = Row.parse(m.row)
    return row.mode, row.zoo, row.family, row.task, row.settings, row.arm


def _line(m: Measurement) -> dict[str, str]:
    row = Row.parse(m.row)
    return {
        "row": code(f"{row.family}/{row.task}/{row.settings}"),
        "mode": row.mode,
        "arm": row.arm,
        "eager ms": _milliseconds(m.eager),
        "arm ms": _milliseconds(m.time),
        "speed-up": f"{m.speedup:.2f}x" + (" (slower)" if m.slower else ""),
        "host ms, eager": _milliseconds(m.host_eager),
        "host ms": _milliseconds(m.host),
        "capture ms": f"{m.capture:.0f}",
        "memory MiB, eager": f"{m.memory_eager / 2**20:.0f}",
        "memory": f"{m.memory / m.memory_eager - 1:+.0%}" if m.memory_eager else "",
        "network": "" if m.share is None else f"{m.share:.0%}",
        "ceiling": "" if m.ceiling is None else "none" if math.isinf(m.ceiling) else f"{m.ceiling:.2f}x",
    }


def _milliseconds(times: Spread) -> str:
    return f"{_short(times.middle / 1e3)} ({_short(times.low / 1e3)} to {_short(times.high / 1e3)})"


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
