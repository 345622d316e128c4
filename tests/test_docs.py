"""What docs/refused.md shows is what happens: every example is judged, and every cause is on the page."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from parity.judge import judging
from parity.judge.outcome import CAUSES, Outcome
from parity.judge.verdict import Verdict, verdict_of
from parity.rows.discovery import Catalogue, discover
from parity.rows.row import Row, Settings
from parity.runtime.engine import engine

ENGINE = "emulated"
PAGE = (Path(__file__).parents[1] / "docs" / "refused.md").read_text(encoding="utf-8")
ONLY_IN_TRAINING = {"autocast-cache", "autocast-backward", "grad-layout", "grad-accumulation", "reduction-order"}

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:> ([^\n]*)\n)?", re.DOTALL | re.MULTILINE)
MARKER = re.compile(r"# (refused|cured|training): ([a-z0-9-]+)(?:, (\w+))?")
PROVED = re.compile(r"`(\w+)`, class `(\w+)` \(`([a-z0-9-]+)`\), proof `([a-z-]+)`; graphed `(\w+)`")
UNPROVED = re.compile(r"`(\w+)` \(`([a-z0-9-]+)`\), check `(\w+)`: (.+?)(?:; graphed `(\w+)`)?")
MESSAGE = re.compile(r"`(\w+)` \(`([a-z0-9-]+)`\), check `(\w+)`: (.+?)(?:; line `(.+)`)?")


@dataclass(frozen=True)
class Example:
    """One block of the page. A ``refused`` one is told of by its message; a ``cured`` one passes on ``bare`` and on ``graphed``; one of
    ``training`` is judged as a step, cast to ``dtype``."""

    kind: str
    cause: str
    dtype: str
    code: str
    message: str

    @property
    def name(self) -> str:
        return f"docs_{self.kind}_{self.cause}".replace("-", "_")

    @property
    def mode(self) -> str:
        return "training" if self.kind == "training" else "inference"

    def __str__(self) -> str:
        return f"{self.kind}-{self.cause}"


def examples_of(page: str) -> tuple[dict[str, str], list[Example]]:
    """The head of each mode, and the examples. A block that says of itself neither is an error."""
    heads, found = {}, []
    for code, message in BLOCK.findall(page):
        first = code.partition("\n")[0]
        if first in ("# head", "# training head"):
            heads["inference" if first == "# head" else "training"] = code
            continue
        marker = MARKER.fullmatch(first)
        assert marker is not None, (
            f"an example begins with '# refused: CAUSE', '# cured: CAUSE' or '# training: CAUSE', not with {first!r}"
        )
        kind, cause, dtype = marker.groups()
        found.append(Example(kind, cause, dtype or "float32", code, message))
    return heads, found


def uncovered(page: str) -> list[str]:
    """What the page lacks, in words: causes that it passes over, examples without a cure and cures without an example."""
    _, found = examples_of(page)
    refused, cured, training = ([e.cause for e in found if e.kind == kind] for kind in ("refused", "cured", "training"))
    unknown = ["unknown"] if "### unknown" in page else []
    told = {*refused, *training, *unknown}
    lacks = [f"{cause} is not on the page" for cause in CAUSES if cause not in told]
    twice = {c for causes in (refused, training) for c in causes if causes.count(c) > 1}
    lacks += [f"{cause} is no cause, or is there twice" for cause in sorted(told - {*CAUSES} | twice)]
    lacks += [f"{cause} is refused and not cured, or the other way round" for cause in sorted(set(refused) ^ set(cured))]
    return lacks


def unlike(example: Example, found: Verdict) -> list[str]:
    """Where a verdict is not what the page says of an example."""
    if example.kind == "cured":
        return [] if found.verdict == "screened" else [f"{found} where the page shows a cure"]
    said = MESSAGE.fullmatch(example.message)
    if said is None:
        return [f"no message in the form of the others: {example.message!r}"]
    verdict, cause, check, detail, line = said.groups()
    pairs = [(cause, example.cause), (verdict, found.verdict), (cause, found.cause), (check, found.check)]
    wrong = [f"the page says {mine!r}, parity {theirs!r}" for mine, theirs in pairs if mine != theirs]
    if detail not in found.detail:
        wrong.append(f"{detail!r} is no part of {found.detail!r}")
    if found.where.partition(" ")[2] != (line or ""):
        wrong.append(f"the page names the line {line!r}, parity {found.where!r}")
    return wrong


def unlike_step(example: Example, bare: Outcome, graphed: Outcome) -> list[str]:
    """Where two arms of a training step are not what the page says of them."""
    found = verdict_of(bare, ENGINE)
    ours = graphed.training.get("class") or verdict_of(graphed, ENGINE).verdict
    if (proved := PROVED.fullmatch(example.message)) is not None:
        verdict, kind, cause, proof, healed = proved.groups()
        told = bare.training
        pairs = [
            (verdict, found.verdict),
            (kind, told["class"]),
            (cause, told["cause"]),
            ([proof], list(told["proof"])),
            (healed, ours),
        ]
    elif (unproved := UNPROVED.fullmatch(example.message)) is not None:
        verdict, cause, check, detail, healed = unproved.groups()
        pairs = [(verdict, found.verdict), (cause, found.cause), (check, found.check), (True, detail in found.detail)]
        pairs += [(healed, ours)] if healed else []
    else:
        return [f"no message in the form of the others: {example.message!r}"]
    return [f"the page says {mine!r}, parity {theirs!r}" for mine, theirs in [*pairs, (cause, example.cause)] if mine != theirs]


HEADS, EXAMPLES = examples_of(PAGE)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalogue]:
    """Every example as a case file; one thread, and a heap in which only what a row makes is looked through."""
    folder = tmp_path_factory.mktemp("refused")
    for example in EXAMPLES:
        (folder / f"{example.name}.py").write_text(HEADS[example.mode] + example.code, encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with engine(ENGINE).entered():  # which imports more of torch
        pass
    gc.collect()
    gc.freeze()
    yield cast(discover(sorted(folder.glob("*.py"))))
    gc.unfreeze()
    torch.set_num_threads(threads)


def cast(cases: Catalogue) -> Catalogue:
    """Each training example at the dtype that the page gives it."""
    dtypes = {e.name: e.dtype for e in EXAMPLES if e.kind == "training"}
    (zoo,) = cases.zoos
    families = (replace(f, dtypes=(dtypes[f.name],)) if f.mode == "training" else f for f in zoo.families)
    return replace(cases, zoos=(replace(zoo, families=tuple(families)),))


def outcome(example: Example, arm: str, cases: Catalogue) -> Outcome:
    row = Row("case", example.name, example.mode, example.mode, Settings(dtype=example.dtype), arm)
    return judging.judge(row, cases, ENGINE)


def judged(example: Example, arm: str, cases: Catalogue) -> Verdict:
    return verdict_of(outcome(example, arm, cases), ENGINE)


def chosen(kind: str) -> Sequence[Example]:
    return [e for e in EXAMPLES if e.kind == kind]


@pytest.mark.parametrize("example", chosen("refused"), ids=str)
def test_a_refused_example_gets_the_verdict_cause_and_line_on_the_page(example: Example, cases: Catalogue) -> None:
    assert unlike(example, judged(example, "bare", cases)) == []


@pytest.mark.parametrize("arm", ["bare", "graphed"])
@pytest.mark.parametrize("example", chosen("cured"), ids=str)
def test_a_cured_example_is_screened(example: Example, arm: str, cases: Catalogue) -> None:
    assert unlike(example, judged(example, arm, cases)) == []


def test_what_the_page_says_of_the_other_arm(cases: Catalogue) -> None:
    by_cause = {e.cause: e for e in chosen("refused")}
    assert judged(by_cause["python-branch"], "graphed", cases).safe
    assert judged(by_cause["host-state"], "graphed", cases).cause == "host-state"
    mutation = judged(by_cause["input-mutation"], "graphed", cases)
    assert (mutation.verdict, mutation.cause) == ("uncapturable", "input-mutation")


def test_an_unregistered_generator_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "docs_own_generator.py"
    path.write_text(
        HEADS["inference"]
        + "class Model(nn.Module):\n"
        + "    def forward(self, x):\n"
        + "        if not hasattr(self, 'own'):\n"
        + "            self.own = torch.Generator(x.device).manual_seed(0)\n"
        + "        return x + torch.rand(8, device=x.device, generator=self.own)\n",
        encoding="utf-8",
    )
    found = verdict_of(judging.judge(Row("case", path.stem, "inference", arm="bare"), discover([path]), ENGINE), ENGINE)
    assert (found.verdict, found.cause) == ("uncapturable", "rng"), "adapt the section `rng` of docs/refused.md"


@pytest.mark.parametrize("example", chosen("training"), ids=str)
def test_a_training_example_gets_what_the_page_says(example: Example, cases: Catalogue) -> None:
    assert unlike_step(example, outcome(example, "bare", cases), outcome(example, "graphed", cases)) == []


def test_every_cause_is_on_the_page() -> None:
    assert uncovered(PAGE) == []
    assert {e.cause for e in EXAMPLES} - {e.cause for e in EXAMPLES if e.kind == "refused"} == ONLY_IN_TRAINING


def test_a_page_that_passes_over_a_cause_is_noticed() -> None:
    assert uncovered(PAGE.replace("# refused: python-branch\n", "# refused: python-brunch\n")) == [
        "python-branch is not on the page",
        "python-brunch is no cause, or is there twice",
        "python-branch is refused and not cured, or the other way round",
        "python-brunch is refused and not cured, or the other way round",
    ]
    assert uncovered(PAGE.replace("# training: grad-layout\n", "# training: dead-input\n")) == [
        "grad-layout is not on the page",
        "dead-input is no cause, or is there twice",
    ]
    with pytest.raises(AssertionError, match="begins with"):
        examples_of(PAGE.replace("# cured: rng\n", "# healed: rng\n"))


@pytest.mark.parametrize("cause", ["grad-accumulation", "grad-layout"])
def test_a_training_message_that_says_something_else_is_noticed(cause: str, cases: Catalogue) -> None:
    example = next(e for e in chosen("training") if e.cause == cause)
    arms = outcome(example, "bare", cases), outcome(example, "graphed", cases)
    assert unlike_step(example, *arms) == []
    for right, wrong in [("`wrong`", "`unproven`"), ("`screened`", "`wrong`"), ("each batch", "no batch"), ("outputs", "inputs"),
                         ("`exact`", "`wrong`"), ("float", "one")]:  # fmt: skip
        changed = replace(example, message=example.message.replace(right, wrong))
        assert len(unlike_step(changed, *arms)) == (changed != example), (right, wrong)
    assert unlike_step(replace(example, message=""), *arms)
    assert unlike_step(replace(example, cause="rng"), *arms)


def test_a_page_that_says_something_else_is_noticed(cases: Catalogue) -> None:
    example = next(e for e in chosen("refused") if e.cause == "python-counter")
    found = judged(example, "bare", cases)
    assert unlike(example, found) == []
    for right, wrong in [("`wrong`", "`unstable`"), ("`replay`", "`churn`"), ("scalars", "names"), ("x * self", "y * self")]:
        changed = replace(example, message=example.message.replace(right, wrong))
        assert len(unlike(changed, found)) == 1, (right, wrong)
    assert len(unlike(replace(example, cause="rng"), found)) == 1
    assert unlike(replace(example, message=""), found)
    assert unlike(replace(example, kind="cured"), found)
