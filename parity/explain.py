"""``parity explain TARGET``: why a model cannot be captured, or replays wrong numbers, where, and what to do."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from parity.certification import STUDY, studies
from parity.judge.outcome import Outcome
from parity.options import AsJson, EngineName, Families, Names, Seed
from parity.record.explanation import Explanation, explanation, render
from parity.rows.discovery import Catalogue, discover, is_case, usual_sources
from parity.rows.row import Row
from parity.run.isolate import Options, probe, warming

_SHAPE: Final = re.compile(r"(\d+(x\d+)*)?(:[a-z0-9]+)?")
_FACTORY: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_MESSAGE: Final = "TargetError: "

TEMPLATE: Final = '''"""{target}, as a case."""

from parity.judge.explain.target import build_from, probes_from

MODE = "inference"


def build():
    return build_from({target!r})


def probes(device):
    return probes_from({inputs!r}, device)
'''


@dataclass(frozen=True)
class Target:
    """What is asked about: its rows, the one to answer for first, in a catalogue that knows them. ``given``: as the user wrote it;
    ``ours``: whether a row that cannot be built is the user's input, not a finding."""

    given: str
    catalogue: Catalogue
    rows: tuple[Row, ...]
    ours: bool


class BadTarget(ValueError):
    """The target is not one, or lacks something. The message names it, with an example of the right form."""


def target_of(text: str, inputs: Sequence[str], families: Sequence[str], folder: Path) -> Target:
    """A row id, a case file, or ``package.module:factory``. ``folder``: where a case for a factory may be written.

    Raises BadTarget, or DiscoveryError for a file or row that is not there.
    """
    if is_case(text):
        if inputs:
            raise BadTarget("--input is for package.module:factory; a case file draws its inputs in probes(device)")
        return _case(text, Path(text))
    if text.count("/") == 5:
        if inputs:
            raise BadTarget("--input is for package.module:factory; a row draws the inputs that its family declares")
        catalogue = discover(usual_sources(families))
        row = Row.parse(text)
        declared = catalogue.declaration(row).rows()
        if row.with_arm(declared[0].arm) not in [r.with_arm(declared[0].arm) for r in declared]:
            raise BadTarget(f"no row is called {text}; its family declares {', '.join(sorted({r.id for r in declared})[:6])}")
        return Target(text, catalogue, (row,), ours=False)
    if _FACTORY.fullmatch(text):
        return _factory(text, inputs, folder)
    raise BadTarget(
        f"{text!r} is no target; the right forms: a row's id (see `parity list`), such as "
        "libreyolo/ppyoloe/detect/inference/256px-b1-float32/bare; a case file, such as my_case.py; or package.module:factory with an "
        "--input per argument, such as torchvision.models:resnet18 --input 1x3x224x224"
    )


def _case(given: str, path: Path) -> Target:
    catalogue = discover([str(path)])
    (declared,) = catalogue.zoos[0].families
    rows = sorted(declared.rows(), key=lambda row: row.arm != "bare")
    return Target(given, catalogue, tuple(rows), ours=True)


def _factory(text: str, inputs: Sequence[str], folder: Path) -> Target:
    if not inputs:
        raise BadTarget(f"{text}: what it is called with is not known; give one --input per argument, such as --input 1x3x224x224 or "
                        "--input 1x16:int64")  # fmt: skip
    for given in inputs:
        if not given or not _SHAPE.fullmatch(given):
            raise BadTarget(f"--input {given!r}: sizes joined by x, and a dtype other than float32, such as 1x3x224x224 or 1x16:int64")
    path = folder / f"{re.sub(r'[^A-Za-z0-9]', '_', text)}.py"
    path.write_text(TEMPLATE.format(target=text, inputs=list(inputs)), encoding="utf-8")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # children get this path; a factory is looked for where the user stands, as by `python -m`
    return _case(text, path)


def answer(target: Target, engine: str, *, timeout: float = 300.0, seed: int = 0) -> Explanation:
    """Judges and studies the target in children and puts the answer together. Raises BadTarget, RunError."""
    sources, name = target.catalogue.sources, target.rows[0].zoo
    study = target.rows[0].with_arm("eager")
    with closing(warming(sources, [name], STUDY)) as server:
        devices: Sequence[str] = ()
        if engine != "emulated":
            probed = probe(sources, engine, [name])  # while the server imports
            engine, devices = probed["engine"], probed["devices"]
        options = Options(engine, sources, timeout=timeout, seed=seed, devices=tuple(devices))
        outcomes: dict[str, Outcome] = {outcome.row: outcome for outcome in studies((study, *target.rows), options, server)}
    judged = [outcomes[row.id] for row in target.rows]
    if target.ours and judged[0].status == "broken":
        raise BadTarget(_at_fault(outcomes[study.id], judged[0], target.given))
    declared, zoo = target.catalogue.declaration(target.rows[0]), target.catalogue.zoo(name)
    known = {row.arm: declared.expectation(row, engine, zoo.version()) for row in target.rows if judged[0].status == "judged"}
    return explanation(target.given, engine, judged, outcomes[study.id], known)


def _at_fault(studied: Outcome, judged: Outcome, given: str) -> str:
    """What is wrong with the user's own model or file, without what the user did not choose: the row's name, and that of ``build()``
    where a factory was ``given``. A study of inference says more than the judge, one of training less."""
    more = studied.status == "broken" and Row.parse(studied.row).mode == "inference"
    message = (studied.message if more else judged.message).removeprefix(f"{studied.row}: ")
    message = message.partition(_MESSAGE)[2] or message.removeprefix(f"{judged.row}: ")
    return message.replace("build()", f"{given}()", 1) if _FACTORY.fullmatch(given) else message


def explain(
    target: Annotated[str, typer.Argument(help="A row's id, a case file (it is executed), or package.module:factory.")],
    input: Annotated[Names, typer.Option("--input", help="For a factory, per argument: 1x3x224x224 or 1x16:int64.")] = [],  # noqa: B006
    engine: EngineName = "auto",
    families: Families = [],  # noqa: B006
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for each look at the model.")] = 300.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Say why a model cannot be captured or replays wrong numbers: cause, operation, line, submodule, what to do, where to cut.

    \b
    Examples:
      parity explain libreyolo/ppyoloe/detect/inference/256px-b1-float32/bare
      parity explain torchvision.models:resnet18 --input 1x3x224x224
      parity explain my_case.py --json
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-")))
        told: dict[str, Any] = answer(target_of(target, input, families, folder), engine, timeout=timeout, seed=seed)
    typer.echo(json.dumps(told, indent=1, sort_keys=True) if as_json else render(told))
    raise typer.Exit(0 if told["expected"] else 1)
