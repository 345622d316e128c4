"""A case file: one module with a model, judged like a family. It is executed, in the child that judges it.

It declares ``build()``, ``probes(device) -> (args, args)`` and ``MODE``; for training ``loss(output, *inputs)``; optionally
``between(module)``, ``context(device)`` and ``ACCUMULATE``.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.rows.family import Family, Subject, Zoo
from parity.rows.row import MODES, Settings

CASE = "case"
"""The zoo of case files."""

EXAMPLE = """
    MODE = "inference"
    def build():
        return MyModule()
    def probes(device):
        return (torch.rand(1, 8).to(device),), (torch.randn(1, 8).to(device),)"""


class CaseError(ValueError):
    """A case file that cannot be read, or lacks something."""


def declared(path: Path) -> dict[str, Any]:
    """What a file declares at its top level, without executing it: names to constants, None for functions and everything else."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise CaseError(f"{path}: no such case file ({error.strerror})") from error
    except (SyntaxError, ValueError) as error:
        raise CaseError(f"{path}: not Python: {error}") from error
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = None
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return found


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"parity_case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _later(path: Path, name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return getattr(_module(path), name)(*args)

    return call


def case_family(path: Path) -> Family:
    """The family of one case file. Raises CaseError naming what the file lacks, with an example of the right form."""
    names = declared(path)
    mode = names.get("MODE", "")
    missing = [n for n in ("build", "probes") if n not in names] + ["MODE"] * (mode not in MODES)
    if mode == "training" and "loss" not in names:
        missing.append("loss")
    if missing:
        raise CaseError(f"{path}: a case file needs {', '.join(missing)}; the right form:{EXAMPLE}")

    def build(settings: Settings) -> Subject:
        module = _module(path).build()
        return Subject(module.train(mode == "training"), module)

    try:
        return Family(
            CASE,
            path.stem,
            mode,
            build,
            lambda size, batch: (),
            other_batch=None,
            arms=("bare", "graphed"),
            unavailable="its MODE is training, and only inference is judged so far" if mode == "training" else "",
            probes=_later(path, "probes"),
            between=_later(path, "between") if "between" in names else None,
            context=_later(path, "context") if "context" in names else None,
        )
    except ValueError as error:
        raise CaseError(f"{path}: {error}: give the file another name") from error


def _warm() -> None:
    import torch  # noqa: F401


def case_zoo(paths: Sequence[Path]) -> Zoo:
    """Case files as one zoo."""
    families = tuple(case_family(path) for path in paths)
    return Zoo(CASE, "torch", "pip install torch", families, _warm, lambda: importlib.metadata.version("torch"))
