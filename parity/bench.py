"""``parity bench``: how much faster a row is from graphs, one row at a time, each in a child that has the device to itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from parity.judge.outcome import Outcome
from parity.options import AsJson, EngineName, Families, FamilyName, Mode, Names, NoReports, Size, Task, Timeout, Zoo
from parity.record.bench import EMULATED, Measurement, bench_path, bench_section, measurement_of, write_bench
from parity.record.line import CONTROLS, environment_name
from parity.record.report import write_reports
from parity.rows.discovery import Catalogue, Selection, discover, usual_sources
from parity.rows.row import Row
from parity.run.alone import alone
from parity.run.isolate import Options, Pool, probe

ARMS: Final = ("graphed", "native")
PRECISIONS: Final = ("float32", "bfloat16", "float16", "autocast-bfloat16", "autocast-float16")
TRAINED_IN: Final = "bfloat16"
"""The dtype that autocast casts to in training where none is asked for."""
HARMLESS: Final = ("judged", "unavailable")


@dataclass(frozen=True)
class Unmeasured:
    """A row without a measurement. ``status``: of its outcome; ``judged`` where its arm does not capture."""

    row: str
    status: str
    cause: str
    message: str

    def __str__(self) -> str:
        word = "not captured" if self.status == "judged" else self.status
        return f"{self.row}: {word}{f' ({self.cause})' if self.cause else ''}: {self.message}"


def bench_rows(catalogue: Catalogue, selection: Selection, batches: Sequence[int] = (), precisions: Sequence[str] = ()) -> list[Row]:
    """The rows to measure: those selected, at every batch and precision asked for, or else at their own (training: bfloat16).

    A ``size`` in pixels need not be a declared one. Raises ValueError for an unknown precision, DiscoveryError for unknown names.
    """
    for word in precisions:
        if word not in PRECISIONS:
            raise ValueError(f"precision={word!r} is none of {', '.join(PRECISIONS)}")
    if any(batch < 1 for batch in batches):
        raise ValueError(f"batch={min(batches)}: at least one image")
    edge = int(selection.size) if selection.size.isdigit() else None
    declared = catalogue.select(replace(selection, size="recommended") if edge is not None else selection)
    rows: dict[str, Row] = {}
    for row in declared:
        if row.zoo == CONTROLS and CONTROLS not in selection.zoos:
            continue
        for batch in batches or (row.settings.batch,):
            for dtype in _dtypes(row, precisions):
                settings = replace(row.settings, batch=batch, dtype=dtype, size=row.settings.size if edge is None else edge)
                made = replace(row, settings=settings)
                rows[made.id] = made
    return list(rows.values())


def _dtypes(row: Row, precisions: Sequence[str]) -> list[str]:
    if row.mode == "training":  # weights are float32 in all of it: a precision is what autocast casts to
        return list(dict.fromkeys(p.removeprefix("autocast-") for p in precisions)) or [TRAINED_IN]
    return [p.replace("-", "_") for p in precisions] or [row.settings.dtype]


def measured(
    catalogue: Catalogue, rows: Sequence[Row], probed: Mapping[str, Any], *, repeat: int, timeout: float = 300.0, seed: int = 0
) -> Iterator[Measurement | Unmeasured]:
    """Each row as it is done. ``probed``: what ``run.isolate.probe`` found; of several devices the first is used. Raises RunError."""
    engine, environment = probed["engine"], probed["environment"]
    options = Options(
        engine, catalogue.sources, slots=1, timeout=timeout, seed=seed, isolation="fork",
        devices=tuple(probed["devices"][:1]), judge="parity.run.bench:measure",
    )  # fmt: skip
    versions = {name: str(facts.get("zoo", "")) for name, facts in environment["zoos"].items()}
    with alone(repeat), Pool(options) as pool:
        for outcome in pool.run([[row] for row in rows]):
            yield _told(outcome, engine, environment, versions, repeat)


def _told(
    outcome: Outcome, engine: str, environment: Mapping[str, Any], versions: Mapping[str, str], repeat: int
) -> Measurement | Unmeasured:
    row = Row.parse(outcome.row)
    check = next((c for c in outcome.checks if c.name == "bench"), None)
    if check is None or check.status != "passed":
        cause, detail = (check.cause, check.detail) if check is not None else ("", outcome.message)
        return Unmeasured(row.id, outcome.status, cause, detail or outcome.message)
    facts = {key: environment.get(key, "") for key in ("gpu", "arch", "driver", "torch", "cuda", "cudnn", "cpu", "python")}
    return measurement_of(
        row,
        engine,
        check.figures,
        environment=facts,
        zoo_version=versions.get(row.zoo, ""),
        command=command_of(row, engine, repeat),
        recorded=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def command_of(row: Row, engine: str, repeat: int) -> str:
    """What measures this row alone."""
    words = ["parity", "bench", "--zoo", row.zoo, "--family", row.family, "--task", row.task, "--mode", row.mode, "--arm", row.arm]
    words += ["--size", str(row.settings.size)] if row.settings.size else []
    words += ["--batch", str(row.settings.batch), "--precision", row.settings.dtype.replace("_", "-")]
    return shlex.join([*words, "--repeat", str(repeat), "--engine", engine])


def line(found: Measurement | Unmeasured) -> str:
    """One line for a person."""
    if isinstance(found, Unmeasured):
        return str(found)
    share = "" if found.share is None else f", the network is {found.share:.0%} of the step"
    return f"{found.row}: {found.eager.middle / 1e3:.3f} to {found.time.middle / 1e3:.3f} ms, {found.speedup:.2f}x{share}"


def bench(
    zoo: Zoo = [],  # noqa: B006
    family: FamilyName = [],  # noqa: B006
    task: Task = [],  # noqa: B006
    mode: Mode = [],  # noqa: B006
    arm: Annotated[Names, typer.Option("--arm", help="graphed, native or bare; repeatable. Default: graphed, native.")] = [],  # noqa: B006
    size: Size = "native",
    batch: Annotated[list[int], typer.Option("--batch", help="Repeatable. Default: the row's own.")] = [],  # noqa: B006
    precision: Annotated[Names, typer.Option("--precision", help=f"{', '.join(PRECISIONS)}; repeatable.")] = [],  # noqa: B006
    repeat: Annotated[int, typer.Option("--repeat", help="Samples of each time.")] = 7,
    engine: EngineName = "auto",
    families: Families = [],  # noqa: B006
    reports: Annotated[Path, typer.Option("--reports", help="Where bench/<environment>.jsonl is written.")] = Path("reports"),
    no_reports: NoReports = False,
    timeout: Timeout = 300.0,
    as_json: AsJson = False,
) -> None:
    """Measure eager against graphs: speed-up, host time, capture time, memory; for training also the network's share of a step.

    Example: parity bench --zoo libreyolo --family picodet --batch 2 --batch 8
    """
    console = Console(stderr=True, emoji=False)
    catalogue = discover(usual_sources(families))
    selection = Selection(tuple(zoo), tuple(family), tuple(task), tuple(mode), tuple(arm) or ARMS, size, "")
    rows = bench_rows(catalogue, selection, batch, precision)
    probed = probe(catalogue.sources, engine, sorted({row.zoo for row in rows}))
    real = probed["engine"] == "cuda"
    if not real:
        console.print(EMULATED, markup=False)
    found: list[Measurement | Unmeasured] = []
    for one in measured(catalogue, rows, probed, repeat=repeat, timeout=timeout):
        found.append(one)
        console.print(line(one), markup=False, highlight=False, soft_wrap=True)
        if real and not no_reports and isinstance(one, Measurement):
            write_bench(bench_path(reports, probed["environment"], "cuda"), [one])
    done = [one for one in found if isinstance(one, Measurement)]
    if real and done and not no_reports and any((reports / "evidence").glob("*.jsonl")):
        write_reports(reports)
    if as_json:
        told = [one.to_dict() if isinstance(one, Measurement) else vars(one) for one in found]
        typer.echo(json.dumps(told, indent=1, sort_keys=True))
    else:
        typer.echo(bench_section({environment_name(probed["environment"], probed["engine"]): done}))
    odd = [one for one in found if isinstance(one, Unmeasured) and one.status not in HARMLESS]
    raise typer.Exit(1 if odd or not done else 0)
