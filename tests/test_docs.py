"""What docs/refused.md shows is what happens: every example is judged, and every cause is on the page."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from parity.judge import inference
from parity.judge.outcome import CAUSES
from parity.judge.verdict import Verdict, verdict_of
from parity.record.advice import ADVICE
from parity.rows.discovery import Catalogue, discover
from parity.rows.row import Row
from parity.runtime.engine import engine

ENGINE = "emulated"
PAGE = (Path(__file__).parents[1] / "docs" / "refused.md").read_text(encoding="utf-8")
TRAINING = {"autocast-cache", "autocast-backward", "grad-layout", "grad-accumulation", "reduction-order"}

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:> ([^\n]*)\n)?", re.DOTALL | re.MULTILINE)
MARKER = re.compile(r"# (refused|cured): ([a-z0-9-]+)(?:, arm (\w+))?")
MESSAGE = re.compile(r"`(\w+)` \(`([a-z0-9-]+)`\), check `(\w+)`: (.+?)(?:; line `(.+)`)?")


@dataclass(frozen=True)
class Example:
    """One block of the page. ``arm`` is the one that must refuse it; a cured one passes on ``bare`` and on ``graphed``."""

    kind: str
    cause: str
    arm: str
    code: str
    message: str

    @property
    def name(self) -> str:
        return f"docs_{self.kind}_{self.cause}".replace("-", "_")

    def __str__(self) -> str:
        return f"{self.kind}-{self.cause}"


def examples_of(page: str) -> tuple[str, list[Example]]:
    """The head that all examples share, and the examples. A block that says of itself neither is an error."""
    head, found = "", []
    for code, message in BLOCK.findall(page):
        first = code.partition("\n")[0]
        if first == "# head":
            head = code
            continue
        marker = MARKER.fullmatch(first)
        assert marker is not None, f"an example begins with '# refused: CAUSE' or '# cured: CAUSE', not with {first!r}"
        kind, cause, arm = marker.groups()
        found.append(Example(kind, cause, arm or "bare", code, message))
    return head, found


def uncovered(page: str) -> list[str]:
    """What the page lacks, in words: causes that it passes over, examples without a cure and cures without an example."""
    _, found = examples_of(page)
    refused, cured = ([e.cause for e in found if e.kind == kind] for kind in ("refused", "cured"))
    training = re.findall(r"^- `([a-z-]+)`", page.partition("## Belongs to training")[2], re.MULTILINE)
    unknown = ["unknown"] if "### unknown" in page else []
    told = [*refused, *training, *unknown]
    lacks = [f"{cause} is not on the page" for cause in CAUSES if cause not in told]
    lacks += [f"{cause} is no cause, or is there twice" for cause in sorted(set(told)) if cause not in CAUSES or told.count(cause) > 1]
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


HEAD, EXAMPLES = examples_of(PAGE)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalogue]:
    """Every example as a case file; one thread, and a heap in which only what a row makes is looked through."""
    folder = tmp_path_factory.mktemp("refused")
    for example in EXAMPLES:
        (folder / f"{example.name}.py").write_text(HEAD + example.code, encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with engine(ENGINE).entered():  # which imports more of torch
        pass
    gc.collect()
    gc.freeze()
    yield discover(sorted(folder.glob("*.py")))
    gc.unfreeze()
    torch.set_num_threads(threads)


def judged(example: Example, arm: str, cases: Catalogue) -> Verdict:
    return verdict_of(inference.judge(Row("case", example.name, "inference", arm=arm), cases, ENGINE), ENGINE)


def chosen(kind: str) -> Sequence[Example]:
    return [e for e in EXAMPLES if e.kind == kind]


@pytest.mark.parametrize("example", chosen("refused"), ids=str)
def test_a_refused_example_gets_the_verdict_cause_and_line_on_the_page(example: Example, cases: Catalogue) -> None:
    assert unlike(example, judged(example, example.arm, cases)) == []


@pytest.mark.parametrize("arm", ["bare", "graphed"])
@pytest.mark.parametrize("example", chosen("cured"), ids=str)
def test_a_cured_example_is_screened(example: Example, arm: str, cases: Catalogue) -> None:
    assert unlike(example, judged(example, arm, cases)) == []


def test_what_the_page_says_of_the_other_arm(cases: Catalogue) -> None:
    by_cause = {e.cause: e for e in chosen("refused")}
    assert judged(by_cause["python-branch"], "graphed", cases).safe
    assert judged(by_cause["host-state"], "bare", cases).cause == "stale-constant"
    mutation = judged(by_cause["input-mutation"], "graphed", cases)
    assert (mutation.verdict, mutation.cause) == ("uncapturable", "input-mutation")


def test_an_unregistered_generator_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "docs_own_generator.py"
    path.write_text(
        HEAD
        + "class Model(nn.Module):\n"
        + "    def forward(self, x):\n"
        + "        if not hasattr(self, 'own'):\n"
        + "            self.own = torch.Generator(x.device).manual_seed(0)\n"
        + "        return x + torch.rand(8, device=x.device, generator=self.own)\n",
        encoding="utf-8",
    )
    outcome = inference.judge(Row("case", path.stem, "inference", arm="bare"), discover([path]), ENGINE)
    found = verdict_of(outcome, ENGINE)
    assert (found.verdict, found.cause) == ("uncapturable", "rng"), "adapt the section `rng` of docs/refused.md"


def test_every_cause_is_on_the_page() -> None:
    assert uncovered(PAGE) == []
    listed = re.findall(r"^- `([a-z-]+)`: (.*)\.$", PAGE.partition("## Belongs to training")[2], re.MULTILINE)
    assert {cause for cause, _ in listed} == TRAINING
    assert [cause for cause, text in listed if not ADVICE[cause].startswith(text)] == []


def test_a_page_that_passes_over_a_cause_is_noticed() -> None:
    assert uncovered(PAGE.replace("# refused: rng\n", "# refused: rgn\n")) == [
        "rng is not on the page",
        "rgn is no cause, or is there twice",
        "rgn is refused and not cured, or the other way round",
        "rng is refused and not cured, or the other way round",
    ]
    assert uncovered(PAGE.replace("- `grad-layout`", "- grad-layout")) == ["grad-layout is not on the page"]
    with pytest.raises(AssertionError, match="begins with"):
        examples_of(PAGE.replace("# cured: rng\n", "# healed: rng\n"))


def test_a_page_that_says_something_else_is_noticed(cases: Catalogue) -> None:
    example = next(e for e in chosen("refused") if e.cause == "python-counter")
    found = judged(example, "bare", cases)
    assert unlike(example, found) == []
    for right, wrong in [("`wrong`", "`unstable`"), ("`replay`", "`churn`"), ("scalars", "names"), ("x * self", "y * self")]:
        changed = Example("refused", example.cause, "bare", example.code, example.message.replace(right, wrong))
        assert len(unlike(changed, found)) == 1, (right, wrong)
    assert len(unlike(Example("refused", "rng", "bare", example.code, example.message), found)) == 1
    assert unlike(Example("refused", example.cause, "bare", example.code, ""), found)
    assert unlike(Example("cured", example.cause, "bare", example.code, ""), found)
