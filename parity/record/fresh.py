"""When evidence still holds: the same protocol, declaration of the family, judge and zoo. The commit is not asked."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from parity.judge.outcome import PROTOCOL
from parity.rows.family import Family
from parity.rows.row import Row
from parity.rows.training import Training

EMULATED = "runtime/emulated/"
NOT_JUDGED = frozenset({"unavailable", "crashed", "timed_out", "out_of_memory"})


def code_of(source: str) -> str:
    """The lines of a Python file that can change what it does: docstrings, comments and blank lines taken out. Text that is no
    Python is left as it is.
    """
    try:
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return source
    lines = source.splitlines()
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            for row in range(text.lineno, (text.end_lineno or text.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def _source(file: str) -> str:
    return hashlib.sha256(code_of(Path(file).read_text(encoding="utf-8")).encode()).hexdigest()


def _told(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """A value as text that is the same in every process: no addresses, functions by their source and what they close
    over.
    """
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return repr(value)
    if id(value) in seen:
        return "itself"
    seen = seen | {id(value)}
    if isinstance(value, Mapping):
        return ["map", *sorted((repr(key), _told(item, seen)) for key, item in value.items())]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(repr(_told(item, seen)) for item in value)]
    if isinstance(value, (tuple, list)):
        return ["list", *(_told(item, seen) for item in value)]
    if isinstance(value, functools.partial):
        return ["partial", _told(value.func, seen), _told(value.args, seen), _told(value.keywords, seen)]
    if isinstance(value, ModuleType):
        return ["module", value.__name__]
    if isinstance(value, MethodType):
        return ["method", _told(value.__func__, seen), _told(value.__self__, seen)]
    if isinstance(value, FunctionType):
        return ["function", value.__module__, value.__qualname__, _file(value), *_bound(value, seen)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, *((f.name, _told(getattr(value, f.name), seen)) for f in fields(value))]
    if isinstance(value, type):
        return ["class", value.__module__, value.__qualname__, _file(value)]
    content = _told(vars(value), seen) if hasattr(value, "__dict__") else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return ["object", _told(type(value), seen), content]


def _bound(function: FunctionType, seen: frozenset[int]) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_told(cell.cell_contents, seen))
        except ValueError:  # a name that its enclosing function has not bound yet
            cells.append("unbound")
    return [cells, _told(function.__defaults__, seen), _told(function.__kwdefaults__, seen)]


def _file(thing: Any) -> str:
    try:
        file = inspect.getsourcefile(thing)
    except TypeError:  # built in: its version is the interpreter's
        return ""
    return _source(file) if file and Path(file).is_file() else ""


def fingerprint(family: Family | Training) -> str:
    """Hash of everything a family declares and of the source files of its builders.

    The same in every process on every machine.
    """
    return hashlib.sha256(repr(_told(family)).encode()).hexdigest()[:16]


@functools.cache
def judge_fingerprint(mode: str, engine: str, package: Path = Path(__file__).parents[1]) -> str:
    """Hash of the code that decides a verdict of that mode and engine: its protocol, ``judge/<mode>.py``, and every module of ours that
    it imports, however deep. Code that only the other mode's judge imports does not count, nor does the emulated device where there was
    a real one.
    """
    files = imported(package, f"judge/{mode}.py")
    return sources_hash(package, files if engine == "emulated" else {f for f in files if not f.startswith(EMULATED)})


def study_fingerprint() -> str:
    """The same of the code that studies a refused row (``judge/explain/study.py``): where it changed, another look may tell more."""
    return judge_fingerprint("explain/study", "emulated")


def imported(package: Path, start: str) -> set[str]:
    """Files of ``package`` that the file ``start`` imports, itself included, wherever the import stands. Paths are relative."""
    found: set[str] = set()
    left = [start]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for node in _executed(ast.parse((package / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                parents = Path(name).parts[: -node.level or None] if node.level else ()
                module = (node.module or "").split(".") if node.module else []
                base = [*parents, *module] if node.level else module[1:] if module[:1] == [package.name] else None
                names = [] if base is None else [base, *([*base, alias.name] for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name.split(".")[1:] for alias in node.names if alias.name.split(".")[0] == package.name]
            else:
                continue
            for parts in names:
                for candidate in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
                    if (package / candidate).is_file():
                        left.append(candidate)
    return found


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but for what only a type checker reads."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _executed(child)


def sources_hash(folder: Path, files: Iterable[str]) -> str:
    """Hash of the code of some files of a folder, names included."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\n{code_of((folder / name).read_text(encoding='utf-8'))}".encode())
    return digest.hexdigest()[:16]


def stale(record: Mapping[str, Any], fingerprint: str, zoo_version: str) -> str:
    """Why a record does not hold for the judge installed here, this declaration and this zoo, as a sentence; empty where it does."""
    today = (
        ("protocol", PROTOCOL, "the protocol"),
        ("fingerprint", fingerprint, "the family's declaration or builder"),
        ("judge", judge_fingerprint(record["mode"], record["engine"]), "the judge or the runtime"),
        ("zoo_version", zoo_version, f"the version of {record['zoo']}"),
    )
    for name, value, what in today:
        if record[name] != value:
            return f"{what} changed: {record[name]!r} then, {value!r} now"
    return ""


def missing_or_stale(
    rows: Iterable[Row],
    records: Iterable[Mapping[str, Any]],
    family_of: Callable[[Row], Family | Training],
    zoo_versions: Mapping[str, str],
) -> list[tuple[Row, str]]:
    """The rows to run, and why, in order: without evidence, stale, or never judged (crashed, timed out, out of memory).

    ``records``: of one environment. ``family_of``: ``Catalogue.declaration``. ``zoo_versions``: zoo to installed version.
    """
    last = {record["id"]: record for record in records}
    prints: dict[tuple[str, str], str] = {}
    due = []
    for row in rows:
        record = last.get(row.id)
        if record is None:
            due.append((row, "no evidence yet"))
            continue
        family = family_of(row)
        key = (family.key, family.mode)
        if key not in prints:
            prints[key] = fingerprint(family)
        reason = stale(record, prints[key], zoo_versions.get(row.zoo, ""))
        if not reason and record["verdict"] in NOT_JUDGED and record["verdict"] != record["expected"]:
            reason = f"was not judged: {record['verdict']}"
        if reason:
            due.append((row, reason))
    return due
