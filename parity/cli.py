"""The command line: ``parity list | certify | explain | gate | report | diff | bench``. Also ``python -m parity``.

Exit codes: 0 as expected; 1 a difference that somebody must look at; 2 the run itself is not to be trusted (a control survived, no
device where one was demanded, no baseline, bad arguments).
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from parity.bench import bench
from parity.certification import Certification, screened, with_controls
from parity.explain import explain
from parity.options import (
    ArmName,
    AsJson,
    Boundary,
    Dtype,
    EngineName,
    Families,
    FamilyName,
    Mode,
    Names,
    NoReports,
    Reports,
    Seed,
    Size,
    Task,
    Timeout,
    Zoo,
)  # fmt: skip
from parity.progress import Progress, print_summary
from parity.record import diff as differences
from parity.record import gate as gates
from parity.record.evidence import evidence_of, name_of, read_all, read_evidence
from parity.record.evidence import merge as merge_evidence
from parity.record.files import RecordError
from parity.record.fresh import missing_or_stale
from parity.record.junit import write_junit
from parity.record.line import subject
from parity.record.report import write_reports, write_summary
from parity.rows.case import CASE
from parity.rows.discovery import Catalogue, DiscoveryError, Selection, discover, usual_sources
from parity.rows.row import DEFAULT_ARMS, Row
from parity.run.nursery import RunError
from parity.runtime.allowlist import FILE, Allowlist, AllowlistError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)
console = Console(stderr=True, emoji=False)


def sources_of(families: Sequence[str], cases: Sequence[str] = ()) -> list[str]:
    """Where families come from, seen from the current folder, and the case files."""
    return [*usual_sources(families), *cases]


def _print(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, sort_keys=True))


@app.command("list")
def list_rows(
    zoo: Zoo = [], family: FamilyName = [], task: Task = [], mode: Mode = [], arm: ArmName = [],  # noqa: B006
    dtype: Dtype = [], size: Size = "all", boundary: Boundary = None, families: Families = [], as_json: AsJson = False,  # noqa: B006
) -> None:  # fmt: skip
    """Every row that is declared, and what it is expected to be.

    Example: parity list --zoo libreyolo --family yolo9
    """
    catalogue = discover(sources_of(families))
    rows = catalogue.select(_selection(zoo, family, task, mode, arm, dtype, size, boundary))
    if as_json:
        _print([{"id": row.id, "expected": _expected(catalogue, row)} for row in rows])
        return
    for row in rows:
        typer.echo(f"{row.id}  {_expected(catalogue, row)}".rstrip())


def _selection(
    zoo: Names, family: Names, task: Names, mode: Names, arm: Names, dtype: Names, size: str, boundary: str | None = None
) -> Selection:
    return Selection(tuple(zoo), tuple(family), tuple(task), tuple(mode), tuple(arm), size, boundary, tuple(dtype))


def _expected(catalogue: Catalogue, row: Row) -> str:
    family = catalogue.declaration(row)
    if family.unavailable:
        return f"unavailable: {family.unavailable}"
    declared = (e for e in family.expected.get(row.arm, ()) if not e.dtypes or row.settings.dtype in e.dtypes)
    return "; ".join(f"{e.verdict}/{e.cause or 'any cause'}: {e.reason}" for e in declared if e.boundary == row.settings.boundary)


@app.command()
def certify(
    cases: Annotated[list[str] | None, typer.Argument(help="Case files (*.py). They are executed.")] = None,
    zoo: Zoo = [], family: FamilyName = [], task: Task = [], mode: Mode = [], arm: ArmName = [],  # noqa: B006
    dtype: Dtype = [], size: Size = "recommended", boundary: Boundary = None,  # noqa: B006
    engine: EngineName = "auto", families: Families = [],  # noqa: B006
    reports: Reports = Path("reports"),
    no_reports: NoReports = False,
    resume: Annotated[bool, typer.Option("--resume", help="Only rows without evidence, or whose evidence is stale.")] = False,
    shard: Annotated[str, typer.Option("--shard", help="i/n: this machine's part; join the parts with `parity report --merge`.")] = "",
    slots: Annotated[int, typer.Option("--slots", help="Children per device; 0: as many as make sense.")] = 0,
    timeout: Timeout = 300.0,
    seed: Seed = 0,
    isolation: Annotated[str, typer.Option("--isolation", help="warm; fork or spawn: one row per process.")] = "warm",
    explain_refused: Annotated[
        bool, typer.Option("--explain/--no-explain", help="Study refused rows afterwards: why, where, and where to cut.")
    ] = True,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Judge rows and record the evidence. Must-fail controls run along; one that survives voids the run. On the emulated engine,
    which only screens, the arm is `graphed` unless others are named, and the mode is inference unless --mode names training; on a GPU
    both modes are judged.

    Exit code 2, too, where nothing that was asked for could be judged, since its zoo is not installed.

    \b
    Examples:
      parity certify --zoo libreyolo                  a zoo, recommended sizes
      parity certify --family yolo9 --arm native      one way to run a family
      parity certify --zoo libreyolo --mode training  fp16, bf16 and fp32 steps
      parity certify my_case.py --json                a module of your own
    """
    if unknown := [c for c in cases or [] if not c.endswith(".py")]:
        raise DiscoveryError(f"{unknown[0]}: not a case file (*.py); families are named with --family")
    catalogue = discover(sources_of(families, cases or []))
    zoos = [CASE] if cases and not zoo else zoo
    rows = catalogue.select(_selection(zoos, family, task, mode, arm, dtype, size, boundary))
    quiet_reports = no_reports or bool(cases)  # a case belongs to nobody's support matrix
    emulated = rows if cases else screened(rows, mode, arm)
    run = Certification(
        catalogue, rows, engine=engine, emulated=emulated, controls=True,
        reports=None if quiet_reports else reports, shard=shard, resume=resume, slots=slots, timeout=timeout, seed=seed,
        isolation=isolation, explain=explain_refused,
    )  # fmt: skip
    goes_on = "runs"
    try:
        with Progress(console, run.rows, run.engine) as progress:
            for record in run.run():
                progress.advance(record)
            goes_on = "explains"
            due = len(run.unexplained())
            for done, records in enumerate(run.explanations(), 1):
                progress.explaining(done, due, subject(records[0]))
    except KeyboardInterrupt:
        console.print(f"interrupted: {len(run.tally.records)} finished rows are kept; `--resume` {goes_on} the others", markup=False)
        raise typer.Exit(130) from None
    wanted = {row.id for row in (emulated if run.engine == "emulated" else rows)}
    if as_json:
        order = (*DEFAULT_ARMS, "eager")
        chosen = sorted((r for r in run.tally.records if r["id"] in wanted), key=lambda r: (r["family"], order.index(r["arm"])))
        _print(chosen)
    print_summary(console, run, wanted)
    raise typer.Exit(run.tally.exit_code)


app.command()(explain)


@app.command()
def report(
    reports: Reports = Path("reports"),
    merge: Annotated[list[Path] | None, typer.Option("--merge", help="Evidence files of shards to join first; repeatable.")] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Print the matrix for a job summary instead.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write every record as a JUnit test case there too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild SUPPORTS_CUDA_GRAPH.json and SUPPORT_MATRIX.md from evidence, from files alone.

    \b
    Examples:
      parity report
      parity report --merge x.shard-1-of-2.jsonl --merge x.shard-2-of-2.jsonl
    """
    if merge:
        first = read_evidence(merge[0])
        if not first:
            raise RecordError(f"{merge[0]}: holds no record to merge")
        merge_evidence(merge, reports / "evidence" / f"{name_of(first[0])}.jsonl")
    every = [record for records in read_all(reports).values() for record in records]
    if summary:
        typer.echo(write_summary(every))
        return
    if junit is not None:
        write_junit(every, junit)
    written = [str(path) for path in write_reports(reports)]
    if as_json:
        _print(written)
        return
    for path in written:
        typer.echo(path)


@app.command()
def gate(
    evidence: Annotated[Path | None, typer.Argument(help="Evidence to check; default: every file of --reports.")] = None,
    zoo: Zoo = [], family: FamilyName = [], task: Task = [], mode: Mode = [], arm: ArmName = [],  # noqa: B006
    dtype: Dtype = [], size: Size = "recommended", families: Families = [], reports: Reports = Path("reports"),  # noqa: B006
    allowlist: Annotated[Path | None, typer.Option("--allowlist", help="Default: the one in --reports.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compare evidence with the committed allowlist: regressions, unlisted successes, missing rows and zero captures all fail;
    of training also another class and a weaker proof.

    Emulated evidence is left out: it certifies nothing.

    \b
    Examples:
      parity gate --zoo libreyolo
      parity gate --reports fresh --allowlist reports/SUPPORTS_CUDA_GRAPH.json
    """
    catalogue = discover(sources_of(families))
    chosen = catalogue.select(_selection(zoo, family, task, mode, arm, dtype, size))
    complete = not (families or zoo or family or task or mode or arm or dtype or size.isdigit())
    rows = with_controls(catalogue, chosen)  # a control that survived says that nothing beside it counts
    held = Allowlist.load(allowlist or reports / FILE)
    if evidence is not None:
        groups = {str(evidence): read_evidence(evidence)}
    else:
        groups = {n: records for n, records in read_all(reports).items() if records and records[0]["engine"] == "cuda"}
    commands = gates.Commands(tuple(families), reports, allowlist.parent if allowlist is not None else reports)
    findings = []
    for name, records in groups.items():
        files = [evidence] if evidence is not None else evidence_of(reports, name)
        versions = {r["zoo"]: r["zoo_version"] for r in records}
        stale = {row.id: why for row, why in missing_or_stale(rows, records, catalogue.declaration, versions)}
        here = replace(commands, evidence=tuple(files))
        findings += gates.gate(records, held, rows, stale=stale, complete=complete, commands=here)
    if as_json:
        _print([f.to_dict() for f in findings])
    else:
        if findings:
            typer.echo(gates.render(findings, commands))
        told = f"{len(findings)} finding{'s' * (len(findings) != 1)} in {len(groups)} environment{'s' * (len(groups) != 1)}"
        lacking = f"no evidence of a GPU in {reports / 'evidence'}, so nothing to compare; `{commands.certify()}` records it"
        typer.echo(told if groups else lacking)
    raise typer.Exit(gates.exit_code(findings) if groups else 2)


@app.command()
def diff(old: Path, new: Path, as_json: AsJson = False) -> None:
    """What changed between two evidence files, after an upgrade of torch, say: verdicts, causes, kernels.

    Example: parity diff old.jsonl new.jsonl
    """
    changes = differences.diff(read_evidence(old), read_evidence(new))
    if as_json:
        _print([c.to_dict() for c in changes])
    else:
        typer.echo(differences.render_diff(changes))
    raise typer.Exit(differences.exit_code(changes))


app.command()(bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; errors made on purpose are one sentence on stderr, others a traceback."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0 if done.code is None else 2
    except Exception as error:
        on_purpose = isinstance(error, (DiscoveryError, RunError, RecordError, AllowlistError)) or _by_us(error)
        if not on_purpose:
            traceback.print_exception(error)
        text = str(error) if on_purpose else "that is a fault of parity itself, please report it; what was recorded is kept"
        console.print(f"parity: {text}", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


def _by_us(error: Exception) -> bool:
    """Whether it is a ValueError that a line of this package raised: what is said to a user about a value. Others are bugs."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


if __name__ == "__main__":
    sys.exit(main())
