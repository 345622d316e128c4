"""The search finds what agrees and cannot be made smaller, whatever the arms answer; classes follow from proofs alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.judge.counterfactual.conditions import CONDITIONS, Condition
from parity.judge.counterfactual.search import CLASSES, UNCOUNTED, Proof, Search, Trial, class_of, search
from parity.judge.train.proving import Proving

TABLE = (
    Condition("rng", "rng", 0, "both"),
    Condition("cache", "autocast-cache", 1, "eager"),
    Condition("inside", "autocast-backward", 2, "eager"),
    Condition("cudnn", "nondeterministic-kernel", 3, "both"),
    Condition("tf32", "reduction-order", 4, "both"),
    Condition("sampler", "nondeterministic-kernel", 5, "both"),
)
NAMES = [c.name for c in TABLE]
ALL = [frozenset(s) for n in range(len(NAMES) + 1) for s in combinations(NAMES, n)]
SETS = st.sampled_from(ALL)


def needs(*sets: frozenset[str]) -> Callable[[frozenset[str]], bool]:
    return lambda names: any(s <= names for s in sets)


def is_minimal(found: Search, agree: Callable[[frozenset[str]], bool | int]) -> bool:
    assert found.proof is not None
    chosen = frozenset(found.proof.conditions)
    return not any(agree(chosen - {one}) for one in chosen)


@given(st.lists(SETS, min_size=1, max_size=4))
def test_whoever_gains_by_every_condition_is_proved_minimally(sets: list[frozenset[str]]) -> None:
    agree = needs(*sets)
    found = search(agree, TABLE, budget=1000)
    assert found.proof is not None
    assert agree(frozenset(found.proof.conditions))
    assert is_minimal(found, agree)
    assert found.proof.minimal
    assert not found.cut


@given(st.sets(SETS))
def test_whatever_is_answered_a_proof_agrees_and_is_minimal(agreeing: set[frozenset[str]]) -> None:
    found = search(lambda names: names in agreeing, TABLE, budget=1000)
    if found.proof is None:
        assert not agreeing & {frozenset(t.conditions) for t in found.tried}
    else:
        assert frozenset(found.proof.conditions) in agreeing
        assert is_minimal(found, lambda names: names in agreeing)


@given(SETS, SETS)
def test_twists_that_spoil_the_agreement_of_another_capture_do_not_hide_it(needed: frozenset[str], spoilt: frozenset[str]) -> None:
    """A set is enough unless it holds a twist that this capture does not share."""
    spoiling = (spoilt & {"cache", "inside"}) - needed
    found = search(lambda names: needed <= names and not names & spoiling, TABLE, budget=1000)
    assert found.proof is not None
    assert frozenset(found.proof.conditions) == needed


@given(st.sets(SETS), st.integers(1, 12))
def test_nothing_is_asked_twice_and_the_budget_holds(agreeing: set[frozenset[str]], budget: int) -> None:
    asked: list[frozenset[str]] = []

    def agree(names: frozenset[str]) -> bool:
        asked.append(names)
        return names in agreeing

    found = search(agree, TABLE, budget=budget)
    assert len(asked) == len(set(asked)) == len(found.tried) <= budget
    assert [frozenset(t.conditions) for t in found.tried] == asked
    assert search(lambda names: names in agreeing, TABLE, budget=budget) == found
    if found.proof is not None:
        assert frozenset(found.proof.conditions) in agreeing
        assert found.proof.minimal != found.cut


def test_arms_that_agree_are_asked_once() -> None:
    found = search(lambda names: 0, TABLE, budget=1)
    assert found == Search(Proof((), (), True), found.tried, False)
    assert len(found.tried) == 1


def test_a_budget_ends_a_search_and_says_so() -> None:
    found = search(lambda names: False, TABLE, budget=3)
    assert found.proof is None
    assert found.cut
    assert len(found.tried) == 3


def test_a_budget_that_ends_the_minimising_leaves_a_proof_that_says_it_is_not_minimal() -> None:
    whole = search(needs(frozenset({"sampler"})), TABLE, budget=1000)
    assert whole.proof == Proof(("sampler",), ("nondeterministic-kernel",), True)
    cut = search(needs(frozenset({"sampler"})), TABLE, budget=7)
    assert cut.cut
    assert cut.proof == Proof(("rng", "cudnn", "tf32", "sampler"), ("rng", "nondeterministic-kernel", "reduction-order"), False)


def test_time_ends_a_search_too_but_never_before_the_first_answer() -> None:
    found = search(lambda names: False, TABLE, budget=1000, stop=lambda: True)
    assert len(found.tried) == 1
    assert found.cut
    assert search(lambda names: True, TABLE, budget=1000, stop=lambda: True).proof == Proof((), (), True)


def test_cheap_ones_come_first_and_counts_are_kept() -> None:
    found = search(lambda names: 0 if {"cudnn", "tf32"} <= names else 9 - len(names), TABLE, budget=1000)
    assert [t.conditions for t in found.tried][:6] == [
        (),
        ("cache",),
        ("inside",),
        ("rng",),
        ("rng", "cudnn"),
        ("rng", "cudnn", "tf32"),
    ]
    assert [t.differing for t in found.tried][:6] == [9, 8, 8, 8, 7, 0]
    assert found.proof is not None
    assert found.proof.conditions == ("cudnn", "tf32")


def test_a_bare_no_is_not_a_count_and_a_bare_yes_is_none() -> None:
    found = search(lambda names: "cache" in names, TABLE, budget=1000)
    assert [t.differing for t in found.tried] == [UNCOUNTED, 0]


def test_the_real_table_finds_the_needs_of_each_lineage() -> None:
    for needed in (
        {"cudnn-deterministic"},
        {"autocast-cache-off"},
        {"deterministic-algorithms", "substitute:grid_sample"},
        {"deterministic-algorithms", "backward-inside-autocast", "autocast-cache-off"},
        {"incoming-layout-of-outputs"},
        {"math-sdpa", "deterministic-algorithms", "substitute:interpolate"},
    ):
        found = search(needs(frozenset(needed)), CONDITIONS, budget=100)
        assert found.proof is not None
        assert set(found.proof.conditions) == needed
        assert len(found.tried) <= 32


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="budget=0: one comparison"):
        search(lambda names: True, TABLE, budget=0)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 tensors cannot differ"):
        search(lambda names: -1, TABLE, budget=5)


def proof(*names: str) -> Proof:
    chosen = [c for c in CONDITIONS if c.name in names]
    assert len(chosen) == len(names)
    return Proof(tuple(names), tuple(dict.fromkeys(c.cause for c in chosen)), True)


@pytest.mark.parametrize(
    ("made", "stable", "ulp", "said"),
    [
        (proof(), True, 0, ("exact", "")),
        (proof(), False, 5, ("exact", "")),
        (proof("rng-aligned"), True, 9, ("exact", "rng")),
        (proof("cudnn-deterministic"), False, 900, ("eager_noise", "nondeterministic-kernel")),
        (proof("deterministic-algorithms", "substitute:grid_sample"), False, 1, ("eager_noise", "nondeterministic-kernel")),
        (proof("deterministic-algorithms"), True, 900, ("float_rounding", "reduction-order")),
        (proof("deterministic-algorithms"), True, 1, ("one_ulp", "reduction-order")),
        (proof("tf32-off"), True, 2, ("float_rounding", "reduction-order")),
        (proof("autocast-cache-off"), True, 7, ("float_rounding", "autocast-cache")),
        (proof("backward-inside-autocast"), True, 7, ("float_rounding", "autocast-backward")),
        (proof("incoming-layout-of-outputs"), True, 1, ("one_ulp", "grad-layout")),
        (proof("incoming-layout-of-outputs"), True, -1, ("float_rounding", "grad-layout")),
        (proof("rng-aligned", "autocast-cache-off"), True, 7, ("float_rounding", "autocast-cache")),
        (proof("autocast-cache-off", "cudnn-deterministic"), False, 7, ("eager_noise", "nondeterministic-kernel")),
        (None, True, 7, ("", "")),
    ],
)
def test_class_and_cause_follow_from_the_proof(made: Proof | None, stable: bool, ulp: int, said: tuple[str, str]) -> None:
    assert class_of(made, eager_is_stable=stable, max_ulp=ulp) == said


def test_a_generator_that_cannot_be_aligned_is_a_class_of_its_own() -> None:
    assert class_of(None, eager_is_stable=True, max_ulp=7, rng_alignable=False) == ("own_rng", "rng")
    assert class_of(proof(), eager_is_stable=True, max_ulp=0, rng_alignable=False) == ("exact", "")


@given(st.sets(st.sampled_from(CONDITIONS)), st.booleans(), st.integers(-1, 10), st.booleans())
def test_every_proof_has_a_class(chosen: set[Condition], stable: bool, ulp: int, alignable: bool) -> None:
    name, cause = class_of(proof(*(c.name for c in chosen)), eager_is_stable=stable, max_ulp=ulp, rng_alignable=alignable)
    assert name in CLASSES
    assert bool(cause) == bool(chosen)


ALONE, WIDER = ("rng-aligned",), ("rng-aligned", "deterministic-algorithms")


@pytest.mark.parametrize(("holding", "conditions"), [((set(ALONE),), ALONE), ((set(WIDER),), WIDER), ((), None)])
def test_a_proof_that_does_not_hold_is_widened_by_all_that_quiets(
    monkeypatch: pytest.MonkeyPatch, holding: tuple[set[str], ...], conditions: tuple[str, ...] | None
) -> None:
    """An op that is noisy now and then agrees with itself in the few runs of a search."""
    made = object.__new__(Proving)
    made.notes = []
    first = Search(Proof(ALONE, ("rng",), True), (Trial(ALONE, 0),), False)
    monkeypatch.setattr(made, "_candidates", lambda: ())
    monkeypatch.setattr(made, "_searched", lambda candidates: first)
    monkeypatch.setattr(made, "quietest", lambda names: WIDER)
    monkeypatch.setattr(made, "holds", lambda proof: set(proof.conditions) in holding)
    found = made.find()
    assert (found.proof.conditions if found.proof is not None else None) == conditions
    assert found.tried == first.tried
    assert bool(made.notes) == (conditions != ALONE)
    assert found.proof is None or found.proof.minimal == (conditions == ALONE)
    causes = {ALONE: ("rng",), WIDER: ("rng", "nondeterministic-kernel")}
    assert found.proof is None or found.proof.causes == causes[found.proof.conditions]


def test_what_quiets_eager_alone_need_not_be_all_that_the_arm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager agrees with itself by luck where an op is noisy in the arm: the settings left out are tried before the search gives up."""
    made = object.__new__(Proving)
    made._stop = lambda: False
    needed = {"math-sdpa", "deterministic-algorithms"}
    monkeypatch.setattr(made, "_noise", lambda names: 0 if "math-sdpa" in names else 5)
    monkeypatch.setattr(made, "_differing", lambda names: 0 if needed <= names else 284)
    settings = [c for c in CONDITIONS if c.name in {"cudnn-deterministic", "deterministic-algorithms", "math-sdpa"}]
    twists = [c for c in CONDITIONS if c.kind == "eager"]
    found = made._quieted(settings, twists)
    assert found.proof is not None
    assert set(found.proof.conditions) == needed
    assert not found.proof.minimal
    assert len(found.tried) < 12
