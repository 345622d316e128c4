"""What a person sees of a run: a bar with rows done, verdicts so far and time left, then a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from parity.certification import Certification
from parity.judge.outcome import CLASSES
from parity.judge.verdict import VERDICTS
from parity.record.grade import graded
from parity.record.line import CONTROLS, Record, is_expected
from parity.record.told import in_full, line
from parity.rows.row import Row


class Progress:
    """A bar on a terminal; where there is none, a line per row, so that a log shows what went on. Controls that do what they must are
    told of only where nothing else was asked for: 60 lines of ``wrong`` hide the one that matters."""

    def __init__(self, console: Console, rows: Sequence[Row], engine: str) -> None:
        self.console = console
        self.records: list[Record] = []
        self.only_controls = all(row.zoo == CONTROLS for row in rows)
        self.bar = Bar(
            TextColumn(engine),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=len(rows))

    def __enter__(self) -> Progress:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.__exit__(kind, error, trace)

    def advance(self, record: Record) -> None:
        self.records.append(record)
        self.bar.update(self.task, advance=1, description=", ".join(by_verdict(self.records)))
        told = not self.console.is_terminal and (self.only_controls or record["zoo"] != CONTROLS)
        if told or not is_expected(record):
            self.console.print(line(record), markup=False, highlight=False, soft_wrap=True)

    def explaining(self, done: int, total: int, name: str) -> None:
        """Of the refused subjects, ``done`` were studied, ``name`` the last; begins the bar anew."""
        told = f"explaining {done} of {total}"
        self.bar.update(self.task, total=total, completed=done, description=told)
        if not self.console.is_terminal:
            self.console.print(f"{told}: {name}", markup=False, highlight=False, soft_wrap=True)


def by_verdict(records: Iterable[Record]) -> list[str]:
    """How many of each verdict, in their order, those of training by class: ``2 certified (exact)``, ``1 wrong``."""
    found = Counter((VERDICTS.index(r["verdict"]), CLASSES.index(r["class"]) if r.get("class") else -1, graded(r)) for r in records)
    return [f"{count} {word}" for (_, _, word), count in sorted(found.items())]


def print_summary(console: Console, run: Certification, wanted: set[str]) -> None:
    """Verdicts by zoo, mode and arm, then every record that is not as expected, then what the run means."""
    console.print(f"{run.engine} engine" + ("" if run.engine == "cuda" else ": screened, not certified"), style="italic")
    table = Table("zoo", "mode", "arm", "rows", Column("verdicts", no_wrap=True), "not as declared")
    by_arm: dict[tuple[str, str, str], list[Record]] = {}
    for record in run.tally.records:
        by_arm.setdefault((record["zoo"], record["mode"], record["arm"]), []).append(record)
    for (zoo, mode, arm), records in sorted(by_arm.items()):
        table.add_row(
            zoo, mode, arm, str(len(records)), "\n".join(by_verdict(records)), str(sum(not is_expected(r) for r in records) or "")
        )
    console.print(table)
    absent = Counter(r["message"] for r in run.tally.records if r["verdict"] == "unavailable" and not is_expected(r))
    for why, count in absent.items():
        console.print(f"{count} not judged: {why}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for record in run.tally.unexpected:
        console.print("\n" + in_full(record), markup=False, highlight=False, soft_wrap=True)
    for note in run.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    missing = len(wanted - {r["id"] for r in run.tally.records})
    if missing and not run.shard:
        console.print(f"{missing} of the rows asked for were not judged", style="red")
    if run.left:
        console.print(f"left out without a GPU: {run.left}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if run.tally.survived:
        names = ", ".join(sorted({r["family"] for r in run.tally.survived}))
        console.print(f"This run is void: {CONTROLS} that must do otherwise: {names}", style="bold red")
    elif run.tally.absent:
        console.print("This run is void: nothing that was asked for could be judged", style="bold red")
    elif run.path is not None:
        console.print(f"evidence: {run.path}", markup=False)
