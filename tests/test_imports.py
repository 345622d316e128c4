"""The direction of the rooms, read from the imports, and what importing a door costs. Each rule is shown an offender first."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS: dict[str, tuple[str, ...]] = {
    # module or room: which of ours it may import; the longest name that fits holds
    "parity.runtime": ("parity.runtime",),
    "parity.rows": ("parity.rows",),
    "parity.judge": ("parity.judge", "parity.rows", "parity.runtime"),
    "parity.judge.outcome": (),
    "parity.judge.verdict": ("parity.judge.outcome", "parity.rows"),
    "parity.run": ("parity.run", "parity.judge", "parity.rows"),
    "parity.run.isolate": ("parity.run.lease", "parity.run.nursery", "parity.judge.outcome", "parity.rows"),
    "parity.run.lease": ("parity.run.nursery", "parity.judge.outcome", "parity.rows"),
    "parity.run.nursery": ("parity.judge.outcome", "parity.rows"),
    "parity.record": ("parity.record", "parity.rows", "parity.judge.outcome", "parity.judge.verdict", "parity.runtime.allowlist"),
    "parity": ("parity",),  # the doors
}
NO_TORCH = (
    "parity.rows",
    "parity.record",
    "parity.judge.outcome",
    "parity.judge.verdict",
    "parity.runtime.allowlist",
    "parity.run.isolate",
    "parity.run.lease",
    "parity.run.nursery",
)
LIMIT = 300


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module under parity/ by its dotted name."""
    found = {}
    for path in sorted((root / "parity").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> Iterator[tuple[str, bool]]:
    """(module, whether at module level) for every import; ``from parity.judge import bits`` counts as parity.judge.bits."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) for n in ast.walk(f)}
    typing = {id(n) for f in ast.walk(tree) if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.unparse(f.test) for n in ast.walk(f)}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        outer = id(node) not in inner and id(node) not in typing
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, outer
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole in known else base), outer


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def trespasses(root: Path = ROOT) -> list[str]:
    """One sentence per import that goes the wrong way."""
    found = []
    known = modules(root)
    for name, path in known.items():
        rule = max((room for room in ROOMS if within(name, (room,))), key=len)
        for target, outer in imports(name, path, set(known)):
            top = target.split(".")[0]
            if top == "parity" and not within(target, ROOMS[rule]):
                found.append(f"{name} imports {target}")
            elif top == "families":
                found.append(f"{name} imports {target}: a zoo brings its own families")
            elif outer and top == "torch" and within(name, NO_TORCH):
                found.append(f"{name} imports torch when it is imported")
            elif rule == "parity.runtime" and top not in (*sys.stdlib_module_names, "torch", "parity"):
                found.append(f"{name} imports {target}: the runtime needs torch and the standard library only")
            elif rule == "parity.rows" and top not in (*sys.stdlib_module_names, "torch", "parity"):
                found.append(f"{name} imports {target}: rows need the standard library only")
    return found


def test_every_import_goes_the_right_way() -> None:
    assert trespasses() == []


OFFENDERS = [
    ("parity/runtime/bad.py", "from parity.rows.row import Row", "parity.runtime.bad imports parity.rows.row"),
    ("parity/runtime/bad.py", "def f():\n    import parity.judge.bits", "parity.runtime.bad imports parity.judge.bits"),
    ("parity/runtime/bad.py", "from .. import rows", "parity.runtime.bad imports parity.rows"),
    ("parity/runtime/bad.py", "from parity import __version__", "parity.runtime.bad imports parity"),
    (
        "parity/runtime/bad.py",
        "import numpy",
        "parity.runtime.bad imports numpy: the runtime needs torch and the standard library only",
    ),
    ("parity/runtime/emulated/bad.py", "from ...judge import bits", "parity.runtime.emulated.bad imports parity.judge.bits"),
    ("parity/runtime/allowlist.py", "import torch", "parity.runtime.allowlist imports torch when it is imported"),
    ("parity/rows/bad.py", "import torch", "parity.rows.bad imports torch when it is imported"),
    ("parity/rows/bad.py", "def f():\n    import pandas", "parity.rows.bad imports pandas: rows need the standard library only"),
    ("parity/rows/bad.py", "from parity.runtime import tree", "parity.rows.bad imports parity.runtime.tree"),
    ("parity/judge/bad.py", "from parity.record import line", "parity.judge.bad imports parity.record.line"),
    ("parity/judge/outcome.py", "from parity.judge import bits", "parity.judge.outcome imports parity.judge.bits"),
    ("parity/judge/verdict.py", "import torch", "parity.judge.verdict imports torch when it is imported"),
    ("parity/run/isolate.py", "from parity.judge import arms", "parity.run.isolate imports parity.judge.arms"),
    ("parity/run/isolate.py", "from parity.run import worker", "parity.run.isolate imports parity.run.worker"),
    ("parity/run/bad.py", "from parity.record import line", "parity.run.bad imports parity.record.line"),
    ("parity/record/bad.py", "from parity.judge import bits", "parity.record.bad imports parity.judge.bits"),
    ("parity/record/bad.py", "from parity.run.isolate import Pool", "parity.record.bad imports parity.run.isolate"),
    ("parity/cli.py", "from families.controls import ZOO", "parity.cli imports families.controls: a zoo brings its own families"),
]


@pytest.mark.parametrize(("file", "text", "told"), OFFENDERS)
def test_an_import_that_goes_the_wrong_way_is_found(tmp_path: Path, file: str, text: str, told: str) -> None:
    for name, path in modules().items():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("" if name.count(".") else "__version__ = ''")
    (tmp_path / file).write_text(text)
    assert trespasses(tmp_path) == [told]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("parity/rows/fine.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import torch"),
        ("parity/judge/fine.py", "import torch\nfrom parity.runtime import tree\nfrom parity.rows import row"),
        ("parity/runtime/emulated/fine.py", "from .tape import Tape\nimport torch.nn"),
        ("parity/cli.py", "from parity import __version__\nimport rich\nfrom parity.runtime.allowlist import Allowlist"),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path: Path, file: str, text: str) -> None:
    for path in modules().values():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("")
    (tmp_path / file).write_text(text)
    assert trespasses(tmp_path) == []


def test_every_rule_is_about_something() -> None:
    known = modules()
    assert set(ROOMS) <= set(known)
    assert set(NO_TORCH) <= set(known)
    assert not [name for name in known if "utils" in name]


def test_modules_stay_short() -> None:
    assert {n: lines for n, p in modules().items() if (lines := len(p.read_text().splitlines())) > LIMIT} == {}


# ---- what an import costs


def loaded(code: str, *suspects: str) -> list[str]:
    """Which of the ``suspects`` a fresh interpreter has loaded after ``code``."""
    told = f"{code}\nimport sys\nprint(*(s for s in {suspects!r} if s in sys.modules))"
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split() if done.stdout.strip() else []


HEAVY = ("torch", "pytest", "pandas", "hypothesis")


@pytest.mark.parametrize(
    "module",
    [
        "parity",
        "parity.rows.discovery",
        "parity.rows.probes",
        "parity.runtime.allowlist",
        "parity.runtime",
        "parity.judge.verdict",
        "parity.run.isolate",
        "parity.record.evidence",
    ],
)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}", *HEAVY) == []


def test_the_runtime_brings_torch_alone() -> None:
    assert loaded("import parity.runtime.runner, parity.runtime.model", *HEAVY, "parity.rows", "parity.judge", "families") == ["torch"]


def test_something_heavy_would_be_seen() -> None:
    assert loaded("import parity.judge.bits", *HEAVY) == ["torch"]
    assert "pytest" in loaded("import parity.plugin", *HEAVY)


def test_listing_rows_imports_no_torch() -> None:
    code = "from parity.cli import main; assert main(['list', '--zoo', 'controls']) == 0; assert main(['list', '--json']) == 0"
    assert loaded(code, "torch", "libreyolo", "transformers") == []
