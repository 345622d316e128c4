"""The pytest door: ``pytest parity/ -k yolox``. Options select rows exactly; one test per row; children judge, pytest only reports.

The test of a refused row ends when the row is explained: after all rows were judged.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from parity.certification import Certification, screened_modes
from parity.record.explanation import recorded, render
from parity.record.files import RecordError
from parity.record.learned import FIELD
from parity.record.line import Record, is_expected, rerun
from parity.record.told import in_full
from parity.rows.discovery import Catalogue, DiscoveryError, Selection, discover, usual_sources
from parity.rows.row import ARMS, MODES, Row
from parity.run.nursery import RunError

_CATALOGUE = pytest.StashKey[Catalogue]()
_MATRIX = pytest.StashKey["Matrix"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity", "CUDA graph parity: which rows to judge, and how")
    for name, text in (
        ("zoo", "exact name of a zoo"),
        ("family", "exact name of a family (-k ec would also take every 'detect')"),
        ("task", "exact name of a task"),
        ("mode", "inference or training (screened beside inference only if named)"),
        ("arm", "eager, bare, graphed or native"),
        ("dtype", "float16, bfloat16 or float32: of the settings"),
    ):
        group.addoption(f"--{name}", action="append", default=[], metavar="NAME", help=f"{text}; may be given several times")
    group.addoption("--size", default="recommended", help="recommended, native, all, or an edge in pixels")
    group.addoption("--boundary", default=None, help="only rows cut there, such as 'whole'; '' for the family's own choice")
    group.addoption("--engine", default="auto", choices=("auto", "cuda", "emulated"), help="auto: cuda where a child finds a device")
    text = "folder of families, or a case file, which is executed; may be given several times; default: ./families"
    group.addoption("--families", action="append", default=[], metavar="PATH", help=text)
    group.addoption("--reports", default=None, metavar="DIR", help="record evidence there; default: record nothing")
    group.addoption("--row-timeout", type=float, default=300.0, metavar="SECONDS", help="limit per row")
    text = "do not study refused rows after all were judged, and let their tests end before that, as -x and --maxfail do too"
    group.addoption("--no-explain", action="store_true", help=text)
    group.addoption("--slots", type=int, default=0, help="children per device; 0: as many as make sense")


def selection_of(config: pytest.Config) -> Selection:
    def several(name: str) -> tuple[str, ...]:
        return tuple(config.getoption(f"--{name}"))

    return Selection(
        several("zoo"),
        several("family"),
        several("task"),
        several("mode"),
        several("arm"),
        config.getoption("--size"),
        config.getoption("--boundary"),
        several("dtype"),
    )


def catalogue_of(config: pytest.Config) -> Catalogue:
    if _CATALOGUE not in config.stash:
        config.stash[_CATALOGUE] = discover(usual_sources(config.getoption("--families"), config.rootpath / "families"))
    return config.stash[_CATALOGUE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" not in metafunc.fixturenames or metafunc.function.__module__ != "parity.test_matrix":
        return  # by its function: a zoo's own test file imports it
    try:
        rows = catalogue_of(metafunc.config).select(selection_of(metafunc.config))
    except DiscoveryError as error:
        raise pytest.UsageError(str(error)) from error
    metafunc.parametrize("row", rows, ids=[row.id for row in rows])


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if (row := _row(item)) is not None:
            for name in (row.zoo, row.task, row.mode, row.arm):
                item.add_marker(getattr(pytest.mark, name.replace("-", "_")))


def pytest_configure(config: pytest.Config) -> None:
    try:
        catalogue = catalogue_of(config)
        if (selection := selection_of(config)) != Selection():
            catalogue.select(selection)  # a wrong name is a usage error, not one of collection
    except DiscoveryError as error:
        raise pytest.UsageError(str(error)) from error
    tasks = {f.task for zoo in catalogue.zoos for f in zoo.families}
    words = {zoo.name for zoo in catalogue.zoos} | tasks | set(MODES) | set(ARMS)
    for word in sorted(words):
        config.addinivalue_line("markers", f"{word.replace('-', '_')}: rows of the matrix by zoo, task, mode or arm")


def _row(item: pytest.Item) -> Row | None:
    callspec = getattr(item, "callspec", None)
    row = callspec.params.get("row") if callspec is not None else None
    return row if isinstance(row, Row) else None


class Matrix:
    """Judges all selected rows in parallel, and hands each test the record of its row once it is there.

    ``left``: ids of rows that are not judged, since the engine is emulated and training was not asked for."""

    def __init__(self, config: pytest.Config, rows: list[Row]) -> None:
        reports = config.getoption("--reports")
        self.run = Certification(
            catalogue_of(config),
            rows,
            engine=config.getoption("--engine"),
            emulated=screened_modes(rows, config.getoption("--mode")),
            controls=True,
            reports=Path(reports) if reports else None,
            timeout=config.getoption("--row-timeout"),
            slots=config.getoption("--slots"),
            explain=not (config.getoption("--no-explain") or config.getoption("maxfail")),
        )
        self.left = {row.id for row in rows} - {row.id for row in self.run.rows}
        self.records: dict[str, Record] = {}
        self._stream = self._told()

    def _told(self) -> Generator[Record, None, None]:
        yield from self.run.run()
        for records in self.run.explanations():
            yield from records

    def record(self, row: Row) -> Record:
        """Of a refused row only once it is explained, which is after all rows were judged."""
        while row.id not in self.records or self.run.owed(self.records[row.id]):
            record = next(self._stream, None)
            if record is None and row.id in self.records:
                break  # it could not be explained; the run's notes say why
            if record is None:
                raise RunError(f"{row.id}: the run ended without judging it; again: {rerun(row, self.run.engine)}")
            self.records[record["id"]] = record
        return self.records[row.id]

    def survived(self) -> list[Record]:
        """Controls, judged with every selection, that did not do what they must."""
        for record in self._stream:
            self.records[record["id"]] = record
        return self.run.tally.survived

    def close(self) -> None:
        self._stream.close()


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    """The run behind all rows selected in this session."""
    rows = [row for item in request.session.items if (row := _row(item)) is not None]
    config = request.config
    try:
        made = Matrix(config, rows)
    except (RunError, RecordError, DiscoveryError) as error:
        pytest.exit(f"parity: {error}", returncode=2)  # nothing can be judged: no test is to blame
    config.stash[_MATRIX] = made
    yield made
    made.close()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    matrix = session.config.stash.get(_MATRIX, None)
    rows = [item for item in session.items if _row(item) is not None] if hasattr(session, "items") else []
    if not rows and not session.config.option.collectonly and exitstatus == pytest.ExitCode.OK and session.testscollected == 0:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    if matrix is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and matrix.run.tally.survived:
        session.exitstatus = pytest.ExitCode.INTERRUPTED  # 2: a control survived, so nothing above is to be trusted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    matrix = config.stash.get(_MATRIX, None)
    if matrix is None:
        return
    engine = matrix.run.engine
    if engine == "emulated":
        terminalreporter.write_line("parity: emulated engine: rows are screened, not certified", yellow=True)
    for note in matrix.run.notes:
        terminalreporter.write_line(f"parity: {note}", yellow=True)
    for record in matrix.run.tally.survived:
        terminalreporter.write_line(f"parity: a control did not do what it must, this run is void: {in_full(record)}", red=True)


def judge(row: Row, matrix: Matrix) -> None:
    """What the test of one row asserts: its verdict is the declared one."""
    __tracebackhide__ = True
    if row.id in matrix.left:
        pytest.skip("beside rows of inference, training is screened where `--mode training` asks for it too")
    record = matrix.record(row)
    if record["verdict"] == "unavailable":
        pytest.skip(record["message"] or "unavailable")
    if not is_expected(record):
        pytest.fail(in_full(record), pytrace=False)
    if FIELD in record:
        print(render(recorded(record)))  # as declared, so the test passes: pytest shows it with -rP
