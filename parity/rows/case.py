"""A case file: one module with a model, judged like a family. It is executed, in the child that judges it.

It declares ``build()``, ``probes(device) -> (args, args)`` and ``MODE``; for training ``loss(output, *inputs)``; optionally
``context(device)``, for inference ``between(module)``, for training ``ACCUMULATE``, the number of batches whose gradients add up.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.rows.family import Family, Subject, Zoo
from parity.rows.row import MODES, Settings
from parity.rows.training import Training, TrainSubject

CASE = "case"
"""The zoo of case files."""

ARMS = ("bare", "graphed")

EXAMPLE = """
    MODE = "inference"
    def build():
        return MyModule()
    def probes(device):
        return (torch.rand(1, 8).to(device),), (torch.randn(1, 8).to(device),)"""

TRAINING_EXAMPLE = (
    EXAMPLE.replace('"inference"', '"training"')
    + """
    def loss(output, *inputs):
        return output.mean()"""
)


class CaseError(ValueError):
    """A case file that cannot be read, or lacks something."""


def case_name(path: Path) -> str:
    """The family that a case file is: its name, with an underscore for each blank, which no row's id may hold."""
    return "".join("_" if c.isspace() else c for c in path.stem)


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


_LATEST: dict[Path, ModuleType] = {}
_OPERATORS: dict[str, tuple[Path, Any]] = {}
_COPY_OF: weakref.WeakKeyDictionary[Any, tuple[Path, ModuleType]] = weakref.WeakKeyDictionary()


def _fresh(path: Path) -> ModuleType:
    """A new copy of a case file: it is executed for each build, so that what it keeps in globals starts as in a fresh process."""
    spec = importlib.util.spec_from_file_location(f"parity_case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    _LATEST[path] = module = importlib.util.module_from_spec(spec)
    with _operators_once(path):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _operators_once(path: Path) -> Iterator[None]:
    """An operator of an earlier copy of a file is that of the next, with the body of the next: made once more by its name,
    ``torch.library.custom_op`` frees the one before, and a call of an earlier build ends the process."""
    import torch

    library: Any = torch.library
    made = library.custom_op

    def custom_op(name: str, fn: Any = None, /, **more: Any) -> Any:
        def define(body: Any) -> Any:
            if name in _OPERATORS and _OPERATORS[name][0] == path:
                _OPERATORS[name][1].register_kernel(more.get("device_types"))(body)
            else:
                _OPERATORS[name] = path, made(name, body, **more)
            return _OPERATORS[name][1]

        return define if fn is None else define(fn)

    library.custom_op = custom_op
    try:
        yield
    finally:
        library.custom_op = made


def _latest(path: Path) -> ModuleType:
    return _LATEST[path] if path in _LATEST else _fresh(path)


def _built(path: Path) -> tuple[Any, ModuleType]:
    """What ``build()`` returns, and the copy of the file that it comes from."""
    copy = _fresh(path)
    module = copy.build()
    with contextlib.suppress(TypeError):  # what is no module is told of later
        _COPY_OF[module] = path, copy
    return module, copy


def _probes(path: Path, device: Any) -> Any:
    return _latest(path).probes(device)


def _between(path: Path, module: Any) -> None:
    _, copy = _COPY_OF.get(module, (path, _latest(path)))
    copy.between(module)


@contextlib.contextmanager
def _context(path: Path, device: Any) -> Iterator[None]:
    """Of every copy whose module is still there: nobody says which of them runs."""
    copies = [copy for home, copy in _COPY_OF.values() if home == path]
    with contextlib.ExitStack() as stack:
        for copy in copies or [_latest(path)]:
            stack.enter_context(copy.context(device))
        yield


def case_family(path: Path) -> Family | Training:
    """The family of one case file. Raises CaseError naming what the file lacks, with an example of the right form."""
    names = declared(path)
    mode = names.get("MODE", "")
    missing = [n for n in ("build", "probes") if n not in names] + ["MODE"] * (mode not in MODES)
    if mode == "training" and "loss" not in names:
        missing.append("loss")
    if missing:
        form = TRAINING_EXAMPLE if mode == "training" else EXAMPLE
        raise CaseError(f"{path}: a case file needs {', '.join(missing)}; the right form:{form}")
    return (_trained if mode == "training" else _inferred)(path, names)


def _inferred(path: Path, names: dict[str, Any]) -> Family:
    def build(settings: Settings) -> Subject:
        module, _ = _built(path)
        return Subject(module.eval(), module)

    return Family(
        CASE,
        case_name(path),
        "inference",
        build,
        lambda size, batch: (),
        other_batch=None,
        arms=ARMS,
        probes=functools.partial(_probes, path),
        between=functools.partial(_between, path) if "between" in names else None,
        context=functools.partial(_context, path) if "context" in names else None,
    )


def _trained(path: Path, names: dict[str, Any]) -> Training:
    accumulate = names.get("ACCUMULATE", 1)
    if type(accumulate) is not int or accumulate < 1:
        raise CaseError(f"{path}: ACCUMULATE must be a whole number of batches, 1 or more, written as such")
    if "between" in names:
        raise CaseError(f"{path}: between(module) is called between probes of inference; a training step has none")

    def build(settings: Settings) -> TrainSubject:
        module, case = _built(path)
        return TrainSubject(module.train(), module, lambda forward, *inputs: case.loss(forward(*inputs), *inputs))

    return Training(
        CASE,
        case_name(path),
        "training",
        build,
        lambda settings, probe, seed: (),
        batch=1,
        dtypes=("float32",),
        arms=ARMS,
        accumulate=accumulate,
        probes=functools.partial(_probes, path),
        context=functools.partial(_context, path) if "context" in names else None,
    )


def _warm() -> None:
    import torch  # noqa: F401


def case_zoo(paths: Sequence[Path]) -> Zoo:
    """Case files as one zoo."""
    families = tuple(case_family(path) for path in paths)
    return Zoo(CASE, "torch", "pip install torch", families, _warm, lambda: importlib.metadata.version("torch"))
