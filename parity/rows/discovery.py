"""Finds families: in a folder, through the entry-point group ``parity.families``, or as a case file. Errors name the file."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.rows.case import CaseError, case_zoo
from parity.rows.family import Family, Zoo
from parity.rows.row import ARMS, DEFAULT_ARMS, MODES, Row
from parity.rows.training import DTYPES, Training

ENTRY_POINTS = "parity.families"
_ANNOUNCED = "entry-points"


class DiscoveryError(Exception):
    """A family file that raises or declares nothing, or a name that nothing answers to."""


@dataclass(frozen=True)
class Selection:
    """Exact names; empty means all. ``size``: 'recommended', 'native', 'all', or an edge in pixels. ``arms`` empty: the default ones.
    ``boundary`` None: all; else only rows cut there ('' for the family's own choice). ``dtypes``: of the settings."""

    zoos: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    size: str = "recommended"
    boundary: str | None = None
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As it is asked for on the command line."""
        asked = [(option, v) for name, (option, *_) in _CONDITIONS.items() for v in _values(getattr(self, name))]
        return " ".join(f"--{option} {value or repr(value)}" for option, value in asked)


_CONDITIONS: Mapping[str, tuple[str, Any, Callable[[Row], str]]] = {
    "zoos": ("zoo", (), lambda row: row.zoo),
    "families": ("family", (), lambda row: row.family),
    "tasks": ("task", (), lambda row: row.task),
    "modes": ("mode", (), lambda row: row.mode),
    "arms": ("arm", (), lambda row: row.arm),
    "size": ("size", "all", lambda row: str(row.settings.size)),
    "boundary": ("boundary", None, lambda row: row.settings.boundary or "''"),
    "dtypes": ("dtype", (), lambda row: row.settings.dtype),
}
"""Of each condition its option, what leaves it out, and what a row has in its place."""


def _values(condition: tuple[str, ...] | str | None) -> tuple[str, ...]:
    return condition if isinstance(condition, tuple) else () if condition is None else (condition,)


@dataclass(frozen=True)
class Catalogue:
    """All zoos found, and what was asked of where to look (``sources``: a child process discovers again from them)."""

    zoos: tuple[Zoo, ...]
    sources: tuple[str, ...]

    def zoo(self, name: str) -> Zoo:
        for zoo in self.zoos:
            if zoo.name == name:
                return zoo
        raise DiscoveryError(_unknown("zoo", name, [z.name for z in self.zoos]))

    def declaration(self, row: Row) -> Family | Training:
        """What declares a row. Raises DiscoveryError with near names where there is nothing."""
        keys = {f.key: f for f in self.zoo(row.zoo).families if f.mode == row.mode}
        key = f"{row.zoo}/{row.family}/{row.task}"
        if key not in keys:
            raise DiscoveryError(_unknown(f"family of mode {row.mode}", key, list(keys)))
        return keys[key]

    def family(self, row: Row) -> Family:
        """The family of an inference row. Raises DiscoveryError."""
        found = self.declaration(row)
        if not isinstance(found, Family):
            raise DiscoveryError(f"{row.id}: a row of mode {row.mode}, where one of inference is needed")
        return found

    def training(self, row: Row) -> Training:
        """The declaration of a training row. Raises DiscoveryError."""
        found = self.declaration(row)
        if not isinstance(found, Training):
            raise DiscoveryError(f"{row.id}: a row of mode {row.mode}, where one of training is needed")
        return found

    def select(self, selection: Selection) -> list[Row]:
        """The rows of a selection, in declaration order. Raises DiscoveryError for unknown names and for an empty selection."""
        every = [f for z in self.zoos for f in z.families]
        _known("zoo", selection.zoos, (z.name for z in self.zoos))
        _known("family", selection.families, (f.name for f in every))
        _known("task", selection.tasks, (f.task for f in every))
        _known("mode", selection.modes, MODES)
        _known("arm", selection.arms, ARMS)
        _known("dtype", selection.dtypes, (*DTYPES, *(row.settings.dtype for f in every for row in f.rows())))
        if not selection.size.isdigit():
            _known("size", (selection.size,), ("recommended", "native", "all"))
        rows = self._answering(selection)
        if not rows:
            raise DiscoveryError(self._none_answers(selection))
        return rows

    def _answering(self, selection: Selection) -> list[Row]:
        arms = selection.arms or DEFAULT_ARMS
        rows = []
        for family in (f for z in self.zoos for f in z.families):
            if selection.zoos and family.zoo not in selection.zoos:
                continue
            if selection.families and family.name not in selection.families:
                continue
            if selection.tasks and family.task not in selection.tasks:
                continue
            named = {"recommended": family.sizes[:1], "native": family.sizes[-1:], "all": family.sizes}
            sizes = named[selection.size] if selection.size in named else (int(selection.size),)
            declared = family.rows()
            if "eager" in arms:  # the reference as an arm of its own: never declared, only asked for
                declared += [r.with_arm("eager") for r in declared if r.arm == family.arms[0]]
            rows += [r for r in declared if r.arm in arms and r.settings.size in sizes]
        rows = [r for r in rows if not selection.modes or r.mode in selection.modes]
        rows = [r for r in rows if not selection.dtypes or r.settings.dtype in selection.dtypes]
        return [r for r in rows if selection.boundary is None or r.settings.boundary == selection.boundary]

    def _none_answers(self, selection: Selection) -> str:
        """Why nothing is left: of each condition that alone stands in the way, what it could be."""
        others = []
        for name, (option, anything, value) in _CONDITIONS.items():
            if getattr(selection, name) != anything:
                rows = self._answering(replace(selection, **{name: anything}))
                found = list(dict.fromkeys(value(row) for row in rows))
                more = f" and {len(found) - 8} more" if len(found) > 8 else ""
                others += [f"--{option} could be {', '.join(found[:8])}{more}"] if found else []
        return f"no row answers to {selection}; {', or '.join(others) or 'name fewer conditions'}; see `parity list`"


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or sorted(known)[:8]
    return f"no {kind} is called {name!r}; near: {', '.join(near) or 'there is none at all'}"


def _known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    every = sorted(set(known))
    for name in names:
        if name not in every:
            raise DiscoveryError(_unknown(kind, name, every))


def _load(name: str, path: Path) -> ModuleType:
    is_package = path.is_dir()
    file = path / "__init__.py" if is_package else path
    if name in sys.modules:
        loaded = getattr(sys.modules[name], "__file__", None)
        if loaded is None or not Path(loaded).samefile(file):
            raise DiscoveryError(f"{file}: a module {name} is loaded already, from {loaded}: give one of the two folders another name")
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(path)] if is_package else None)
    if spec is None or spec.loader is None:
        raise DiscoveryError(f"{file}: not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise DiscoveryError(f"{file}: raised {type(error).__name__}: {error}") from error
    return module


def _zoo_of(module: ModuleType, origin: str) -> Zoo:
    zoo = getattr(module, "ZOO", None)
    if not isinstance(zoo, Zoo):
        raise DiscoveryError(f"{origin}: declares no ZOO (a parity.rows.family.Zoo); found {type(zoo).__name__}")
    return zoo


def _folder(folder: Path) -> list[Zoo]:
    package = folder.name
    if (folder / "__init__.py").exists():
        _load(package, folder)
    parts = sorted(p for p in folder.iterdir() if not p.name.startswith(("_", ".")))
    modules = [p for p in parts if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())]
    return [_zoo_of(_load(f"{package}.{p.stem}", p), str(p)) for p in modules]


def is_case(source: str | Path) -> bool:
    return str(source).endswith(".py")


def usual_sources(named: Sequence[str], here: Path = Path("families")) -> list[str]:
    """Where families come from: what was named, or the folder ``here`` if there is one, each with the controls of this package; else
    what installed packages announce."""
    folders = list(named) or ([str(here)] if here.is_dir() else [])
    return [*folders, f"{_ANNOUNCED}:controls" if folders else _ANNOUNCED]


def is_announced(source: str | Path) -> bool:
    """Whether a source is ``entry-points``, what installed packages announce, or ``entry-points:NAME``, one zoo of it."""
    return str(source).partition(":")[0] == _ANNOUNCED


def _announced(known: set[str], only: str) -> list[Zoo]:
    """Zoos of installed packages, but for names that a folder declares already: a checkout's own families go before."""
    found = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name not in known and only in ("", point.name):
            try:
                module = importlib.import_module(point.value.partition(":")[0])
            except Exception as error:
                told = f"entry point {point.name} = {point.value}: raised {type(error).__name__}: {error}"
                raise DiscoveryError(f"{told}; uninstall or mend the package that announces it") from error
            found.append(_zoo_of(module, f"entry point {point.name}"))
    return found


def discover(sources: Sequence[str | Path] = ("families",)) -> Catalogue:
    """All zoos of the ``sources`` (folders of families, case files, ``entry-points``; these last).

    Raises DiscoveryError; imports no model code."""
    zoos: list[Zoo] = []
    cases = [Path(s).resolve() for s in sources if is_case(s)]
    if cases:
        try:
            zoos.append(case_zoo(cases))
        except CaseError as error:
            raise DiscoveryError(str(error)) from error
    for source in sources:
        if is_case(source):
            continue
        if is_announced(source):
            zoos += _announced({zoo.name for zoo in zoos}, str(source).partition(":")[2])
            continue
        folder = Path(source)
        if not folder.is_dir():
            raise DiscoveryError(f"{folder}: no such folder of families")
        zoos += _folder(folder.resolve())
    names = [z.name for z in zoos]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise DiscoveryError(f"declared twice: zoo {', '.join(twice)}")
    keys = Counter(f"{family.key} ({family.mode})" for zoo in zoos for family in zoo.families)
    if twice := sorted(key for key, count in keys.items() if count > 1):
        raise DiscoveryError(f"declared twice: family {', '.join(twice)}")
    return Catalogue(tuple(zoos), tuple(str(s if is_announced(s) else Path(s).resolve()) for s in sources))
